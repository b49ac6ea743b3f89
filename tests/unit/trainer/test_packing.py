"""Packing: the row of each token of each sample."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.algorithm.shared_prefix import FEWEST
from rlpost.errors import DataError
from rlpost.trainer import device
from rlpost.trainer.packing import (
    RowLayout,
    as_trained,
    held_tokens,
    held_values,
    log_prob_micro_batches,
    pack,
    unpack,
)
from rlpost.types import TrainBatch, TrainSample


def sample_of(prompt: int, response: int, dice: random.Random) -> TrainSample:
    """Of these lengths; floats that float32 holds exactly."""
    return TrainSample(
        token_ids=tuple(dice.choices(range(100), k=prompt + response)),
        prompt_length=prompt,
        loss_mask=tuple(dice.choices((0, 1), k=response)),
        rollout_logprobs=tuple(dice.randint(-320, 320) / 32 for _ in range(response)),
        advantage=dice.randint(-320, 320) / 32,
        weight=dice.randint(1, 8) / 8,
        sampling_mask=[range(100)[:: dice.randint(20, 90)] for _ in range(response)],
    )


# Only lengths are drawn one by one, which is what packing looks at; to draw every token took half
# of the time.
samples = st.builds(
    sample_of, st.integers(1, 6), st.integers(1, 6), st.integers().map(random.Random)
)
micro_batches = st.lists(samples, min_size=1, max_size=5).map(tuple)


@given(micro_batches, st.integers(1, 8))
def test_every_sample_is_in_the_row_once_whole_and_in_order(micro_batch, multiple_of):
    packed = pack(micro_batch, RowLayout(row_multiple=multiple_of))
    bounds = packed.cu_seqlens.tolist()
    row = packed.input_ids[0].tolist()
    for sample, start, end in zip(micro_batch, bounds, bounds[1:], strict=False):
        assert tuple(row[start:end]) == sample.token_ids
        assert packed.positions[0, start:end].tolist() == list(range(end - start))


@given(micro_batches, st.integers(1, 8))
def test_padding_is_a_separate_sequence_shorter_than_the_multiple(micro_batch, multiple_of):
    packed = pack(micro_batch, RowLayout(row_multiple=multiple_of))
    num_tokens = sum(len(sample.token_ids) for sample in micro_batch)
    total = packed.input_ids.size(1)
    assert total % multiple_of == 0 and total - num_tokens < multiple_of
    assert packed.cu_seqlens[-1] == total == packed.positions.size(1)
    assert len(packed.cu_seqlens) == len(micro_batch) + 1 + (total > num_tokens)
    assert packed.max_length == packed.cu_seqlens.diff().max()
    assert packed.response_index.max() < num_tokens


@given(micro_batches, st.integers(1, 8))
def test_each_response_token_has_the_values_of_its_sample(micro_batch, multiple_of):
    packed = pack(micro_batch, RowLayout(row_multiple=multiple_of))
    expected = [
        (number, sum(sample.loss_mask), sample.weight, float(mask), sample.advantage, logprob)
        for number, sample in enumerate(micro_batch)
        for mask, logprob in zip(sample.loss_mask, sample.rollout_logprobs, strict=True)
    ]
    columns = (
        packed.sample_index,
        packed.sample_lengths,
        packed.sample_weights,
        packed.loss_mask,
        packed.advantages,
        packed.rollout_logprobs,
    )
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


@given(st.lists(micro_batches, min_size=1, max_size=3))
def test_unpacking_returns_the_values_of_each_sample_and_held_values_packs_them(batch):
    parts = [pack(micro_batch) for micro_batch in batch]
    columns = []
    for part, micro_batch in zip(parts, batch, strict=True):
        values = part.rollout_logprobs.clone()
        columns.append(unpack(values, part))
        values.zero_()  # the columns are a copy
        assert columns[-1] == [sample.rollout_logprobs for sample in micro_batch]
        assert columns[-1] == unpack(part.rollout_logprobs.double(), part)
    for index, part in enumerate(parts):
        values = held_values(columns, index, part)
        assert values.dtype == torch.float32 and torch.equal(values, part.rollout_logprobs)
        assert held_values(None, index, part) is None


@given(
    samples.filter(lambda sample: sample.prompt_length > 1), st.integers(1, 4), st.integers(1, 9)
)
def test_samples_that_share_rows_have_the_tokens_and_logits_of_separate_ones(one, count, multiple):
    """The row that predicts each response token is that of the token before it on its path."""
    answers = [[100 + number] * (number + 1) for number in range(count)]
    prompt = (*range(FEWEST), *one.token_ids[: one.prompt_length])
    micro_batch = tuple(
        replace(
            one,
            token_ids=(*prompt, *answer),
            prompt_length=len(prompt),
            loss_mask=[1] * len(answer),
            rollout_logprobs=[-0.5] * len(answer),
            sampling_mask=None,
        )
        for answer in answers
    )
    layout = RowLayout(row_multiple=multiple, share_prefix=True)
    packed, token = pack(micro_batch, layout), held_tokens(micro_batch, layout)
    num_rows = len(prompt) + sum(map(len, answers))
    assert packed.input_ids.size(1) == num_rows + -num_rows % multiple
    whole = torch.tensor([id for sample in micro_batch for id in sample.token_ids] + [0])
    assert torch.equal(whole[token], packed.input_ids[0])
    assert (token == -1).sum() == -num_rows % multiple
    rows = range(packed.input_ids.size(1)) if count == 1 else packed.key_rows.tolist()
    bounds = packed.cu_seqlens if count == 1 else packed.cu_keys
    assert bounds.dtype == torch.int32 and (packed.key_rows is None) == (count == 1)
    paths = [rows[start:end] for start, end in itertools.pairwise(bounds.tolist())]
    predicting = packed.response_index.tolist()
    assert packed.max_length == max(map(len, paths))
    for sample, path in zip(micro_batch, paths, strict=False):
        assert tuple(packed.input_ids[0, list(path)].tolist()) == sample.token_ids
        assert packed.positions[0, list(path)].tolist() == list(range(len(path)))
        of_response = path[sample.prompt_length - 1 : -1]
        assert predicting[: len(of_response)] == list(of_response)
        del predicting[: len(of_response)]
    assert not predicting


def test_tensors_have_the_types_of_their_fields_and_move_together(monkeypatch):
    packed = pack((replace(sample_of(2, 3, random.Random(1)), weight=1),))
    monkeypatch.setattr(device, "current", lambda: torch.device("meta"))
    moved = packed.on_device()
    for field in dataclasses.fields(packed):
        tensor, there = getattr(packed, field.name), getattr(moved, field.name)
        if not isinstance(tensor, torch.Tensor):
            assert there == tensor
            continue
        floats = ("sample_weights", "loss_mask", "advantages", "rollout_logprobs")
        whole = torch.int32 if field.name == "cu_seqlens" else torch.int64
        assert there.is_meta and tensor.dtype == (torch.float32 if field.name in floats else whole)


def test_sampling_masks_of_some_samples_alone_are_refused():
    one = sample_of(2, 3, random.Random(1))
    assert pack((replace(one, sampling_mask=None),)).mask_sizes is None
    with pytest.raises(
        DataError, match=r"1 of 2 .* have a sampling mask; generate all with --use-"
    ):
        pack((one, replace(one, sampling_mask=None)))


def test_a_micro_batch_without_samples_is_refused():
    with pytest.raises(
        DataError,
        match=r"^cannot pack an empty micro-batch; give every rank at least one sample$",
    ):
        pack(())


@pytest.mark.parametrize("prompt_length", [0, 2])
def test_a_sample_without_prompt_or_response_is_refused(prompt_length):
    response = 2 - prompt_length
    with pytest.raises(DataError, match="sample 0 of a micro-batch"):
        pack((TrainSample((1, 2), prompt_length, (1,) * response, (-0.5,) * response, 1.0),))


@given(micro_batches, st.integers(2, 4), st.integers(1, 2))
def test_context_parallel_ranks_hold_every_position_once_and_equal_work(micro_batch, size, tensor):
    """Every sequence is split into two chunks per rank, one from each end, to balance causal
    attention.
    """
    multiple = 2 * size
    layouts = [RowLayout(multiple * tensor, multiple, rank, size) for rank in range(size)]
    parts = [pack(micro_batch, layout) for layout in layouts]
    lengths = parts[0].cu_seqlens.diff().tolist()
    assert (
        all(length % multiple == 0 for length in lengths)
        and sum(lengths) % (multiple * tensor) == 0
    )
    for number, length in enumerate(lengths):
        bounds = [sum(lengths[:number]) // size, sum(lengths[: number + 1]) // size]
        held = [part.positions[0, slice(*bounds)].tolist() for part in parts]
        assert sorted(position for each in held for position in each) == list(range(length))
        assert len({sum(each) for each in held}) == 1


@given(micro_batches, st.integers(1, 4))
def test_context_parallel_ranks_share_the_response_tokens_of_the_whole(micro_batch, size):
    whole, seen = pack(micro_batch), []
    ids = torch.tensor([token for sample in micro_batch for token in sample.token_ids] + [0])
    for rank in range(size):
        layout = RowLayout(2 * size, 2 * size, rank, size)
        part = pack(micro_batch, layout)
        assert torch.equal(ids[held_tokens(micro_batch, layout)], part.input_ids[0])
        seen += part.held.tolist()
        names = (
            "targets",
            "sample_index",
            "sample_lengths",
            "sample_weights",
            "loss_mask",
            "advantages",
            "rollout_logprobs",
        )
        assert all(
            torch.equal(getattr(part, name), getattr(whole, name)[part.held]) for name in names
        )
        ends = part.mask_sizes.cumsum(0).tolist()
        masks = [mask for sample in micro_batch for mask in sample.sampling_mask]
        assert [
            tuple(part.mask_ids[end - length : end].tolist())
            for end, length in zip(ends, part.mask_sizes.tolist(), strict=True)
        ] == [masks[held] for held in part.held.tolist()]
        starts = part.cu_seqlens[:-1][part.sample_index] // size
        assert (part.response_index >= starts).all()
        before = [sample.token_ids for sample in micro_batch]
        position = part.positions[0, part.response_index].tolist()
        after = [
            before[i][p + 1] for i, p in zip(part.sample_index.tolist(), position, strict=True)
        ]
        assert after == part.targets.tolist()
    assert sorted(seen) == list(range(len(whole.targets)))


@given(st.lists(micro_batches, min_size=1, max_size=4), st.randoms())
def test_log_probs_of_other_groups_are_returned_by_sample(micro_batches_, source):
    """Each sample's value is the sample itself, so that a wrong place shows."""
    count = sum(map(len, micro_batches_))
    order = source.sample(range(count), count)
    groups = tuple(tuple(order[start : start + 2]) for start in range(0, count, 2))
    batch = TrainBatch(tuple(micro_batches_), count, 1, log_prob_groups=groups)
    found = [list(micro_batch) for micro_batch in log_prob_micro_batches(batch)]
    assert all(len(one) <= 2 for one in found)
    assert as_trained(found, batch) == [list(micro_batch) for micro_batch in micro_batches_]
    assert as_trained([], batch) == []
    with pytest.raises(ValueError):
        as_trained([*found, found[0]], batch)


def test_without_groups_log_probs_use_the_micro_batches_of_training():
    batch = TrainBatch(((TrainSample((1, 2), 1, (1,), (-0.5,), 1.0),),), 1, 1)
    assert log_prob_micro_batches(batch) is batch.micro_batches
    assert as_trained([["value"]], batch) == [["value"]]
