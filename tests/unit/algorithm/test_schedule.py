"""The schedule of micro-batches: its invariants for random samples, and its distance from the
optimum.
"""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.algorithm.schedule import (
    break_even_length,
    first_fit,
    lower_bound,
    regroup,
    schedule,
    sequence_work,
)

LIMIT = 64
lengths_of = st.lists(st.integers(1, 2 * LIMIT), min_size=1, max_size=60)
layouts = st.tuples(st.integers(1, 6), st.integers(1, 3))


def whole(lengths, ranks, multiple):
    """So many samples that they can be spread: some of them once more."""
    return lengths + lengths[:1] * (-len(lengths) % (ranks * multiple))


def work_of(schedule_, work):
    return [sum(work[i] for micro_batch in rank for i in micro_batch) for rank in schedule_]


def worst(loads):
    return max(loads) * len(loads) / sum(loads)


@given(lengths_of, layouts, st.booleans(), st.sampled_from([None, 20.0, float("inf")]))
def test_each_sample_is_scheduled_once_and_ranks_have_equal_numbers_of_micro_batches(
    lengths, layout, by_tokens, break_even
):
    """The three invariants of the module, with and without balance, by tokens and by number."""
    ranks, multiple = layout
    if len(lengths) % (ranks * multiple):
        with pytest.raises(ValueError, match="cannot distribute"):
            schedule(
                lengths,
                data_parallel_size=ranks,
                max_tokens=None,
                micro_batch_size=3,
                multiple_of=multiple,
            )
    lengths = whole(lengths, ranks, multiple)
    dealt = schedule(
        lengths,
        data_parallel_size=ranks,
        max_tokens=LIMIT if by_tokens else None,
        micro_batch_size=3,
        multiple_of=multiple,
        work=None
        if break_even is None
        else [sequence_work(length, break_even) for length in lengths],
    )
    assert sorted(i for rank in dealt for micro_batch in rank for i in micro_batch) == list(
        range(len(lengths))
    )
    assert len(dealt) == ranks and len({len(rank) for rank in dealt}) == 1
    assert len(dealt[0]) % multiple == 0
    for micro_batch in itertools.chain.from_iterable(dealt):
        assert micro_batch
        assert (
            len(micro_batch) <= 3
            if not by_tokens
            else sum(lengths[i] for i in micro_batch) <= LIMIT or len(micro_batch) == 1
        )


@given(lengths_of, st.integers(1, 6))
def test_without_work_micro_batches_are_filled_and_assigned_in_sample_order(lengths, ranks):
    """Every micro-batch is in order, and the first samples of those dealt in turn are in order, but
    for those that were split so that all ranks have as many.
    """
    lengths = whole(lengths, ranks, 1)
    dealt = schedule(lengths, data_parallel_size=ranks, max_tokens=LIMIT, micro_batch_size=1)
    in_turn = [micro_batch for row in zip(*dealt, strict=True) for micro_batch in row]
    assert all(micro_batch == sorted(micro_batch) for micro_batch in in_turn)
    packed = first_fit(lengths, range(len(lengths)), LIMIT)
    kept = [micro_batch for micro_batch in in_turn if micro_batch in packed]
    assert kept == sorted(kept, key=lambda one: one[0])
    assert len(kept) >= len(packed) - ranks + 1


@given(lengths_of)
def test_a_sample_goes_into_the_first_micro_batch_with_capacity(lengths):
    """Against the definition, which looks at one micro-batch after the other."""
    plain: list[list[int]] = []
    for index, length in enumerate(lengths):
        fits = (one for one in plain if sum(lengths[i] for i in one) + length <= LIMIT)
        target = next(fits, None)
        if target is None:
            plain.append(target := [])
        target.append(index)
    assert first_fit(lengths, range(len(lengths)), LIMIT) == plain


@given(st.lists(lengths_of, min_size=1, max_size=4), st.integers(1, 3))
def test_other_micro_batches_of_a_ranks_samples_keep_its_samples_and_the_limit(ranks, multiple):
    packed = regroup(ranks, max_tokens=LIMIT, multiple_of=multiple)
    if packed is None:
        most = max(len(first_fit(own, range(len(own)), LIMIT)) for own in ranks)
        assert most + multiple - 1 > min(map(len, ranks))
        return
    assert len({len(bins) for bins in packed}) == 1 and len(packed[0]) % multiple == 0
    for own, bins in zip(ranks, packed, strict=True):
        assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(own)))
        assert all(len(one) == 1 or sum(own[i] for i in one) <= LIMIT for one in bins)


@given(lengths_of)
def test_no_packing_has_fewer_micro_batches_than_the_bound(lengths):
    assert lower_bound(lengths, max_tokens=LIMIT) <= len(
        first_fit(lengths, range(len(lengths)), LIMIT)
    )


def long_tail(count, seed=1):
    source = random.Random(seed)
    return [min(32_768, max(64, int(source.lognormvariate(7.5, 1.0)))) for _ in range(count)]


@pytest.mark.parametrize("break_even", [float("inf"), 40_000])
@pytest.mark.parametrize(("count", "ranks"), [(256, 8), (1024, 8), (1024, 32)])
@pytest.mark.parametrize("limit", [8192, 16_384, 32_768])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_tail_has_even_work_in_as_few_micro_batches_as_its_tokens_fill(
    seed, limit, count, ranks, break_even
):
    """Work even to two percent, and ceil(tokens / limit) micro-batches, in whole rounds of the
    ranks. Only where those would be full to the last twentieth may each rank have one more.
    """
    lengths = long_tail(count, seed)
    work = [sequence_work(length, break_even) for length in lengths]
    dealt = schedule(
        lengths, data_parallel_size=ranks, max_tokens=limit, micro_batch_size=1, work=work
    )
    assert worst(work_of(dealt, work)) <= 1.02
    in_order = schedule(lengths, data_parallel_size=ranks, max_tokens=limit, micro_batch_size=1)
    assert worst(work_of(in_order, work)) > worst(work_of(dealt, work))
    a_rank = -(-sum(lengths) // (limit * ranks))
    nearly_full = sum(lengths) > 0.95 * a_rank * limit * ranks
    assert len(dealt[0]) <= a_rank + nearly_full


def test_micro_batches_of_a_fixed_number_of_samples_have_even_work_too():
    lengths = long_tail(256)
    options = dict(data_parallel_size=8, max_tokens=None, micro_batch_size=4)
    dealt = schedule(lengths, **options, work=lengths)
    assert {len(micro_batch) for rank in dealt for micro_batch in rank} == {4}
    assert (
        worst(work_of(dealt, lengths))
        <= 1.02
        < worst(work_of(schedule(lengths, **options), lengths))
    )


def test_ranks_run_their_heaviest_micro_batches_first_and_so_at_the_same_time():
    lengths = long_tail(512)
    dealt = schedule(
        lengths, data_parallel_size=8, max_tokens=None, micro_batch_size=8, work=lengths
    )
    for rank in dealt:
        loads = [sum(lengths[i] for i in micro_batch) for micro_batch in rank]
        assert loads == sorted(loads, reverse=True)


def test_a_rank_with_few_long_samples_has_as_many_micro_batches_as_the_others():
    """Even work would leave rank 0 with one sample, fewer than the other needs micro-batches."""
    lengths = [1000, *[60] * 9]
    dealt = schedule(
        lengths, data_parallel_size=2, max_tokens=LIMIT, micro_batch_size=1, work=lengths
    )
    assert [len(rank) for rank in dealt] == [5, 5]


@pytest.mark.slow
def test_a_schedule_of_a_hundred_thousand_samples_takes_seconds_at_most():
    """On an idle machine less than one, see docs/benchmarks.md; the square of the number would take
    minutes.
    """
    lengths = long_tail(100_000)
    started = time.process_time()
    schedule(lengths, data_parallel_size=32, max_tokens=16_384, micro_batch_size=1, work=lengths)
    assert time.process_time() - started < 5


def test_attention_costs_as_much_as_the_matrices_at_the_break_even_length():
    """Counted in multiply-adds for two matrices of 8 x 8, three layers and heads 8 wide in all."""
    length = break_even_length(num_parameters=3 * 2 * 64, num_layers=3, attention_width=8)
    matrices = int(length) * 3 * 2 * 64
    attention = 3 * sum(2 * 8 * (position + 0.5) for position in range(int(length)))
    assert attention == pytest.approx(matrices)
    assert sequence_work(int(length), length) == 2 * length
