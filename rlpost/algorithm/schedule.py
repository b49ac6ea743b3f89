"""Schedule samples on data-parallel ranks and in micro-batches. Pure Python.

Input: the lengths of the samples of one optimizer step, the data-parallel size, and either a token
limit or a fixed number of samples. Output: for each rank a list of micro-batches, each a list of
sample indices. Invariants:

    1. every sample is in exactly one micro-batch of one rank;
    2. every rank has the same number of micro-batches and none is empty;
    3. no micro-batch has more than ``max_tokens``, except for a single longer sample.

Memory is counted in tokens, time in work: ``sequence_work`` adds the cost of attention to a
sequence's tokens. Given the work of each sample, samples are first distributed so that the ranks'
sums are even, and then packed on each rank. A step takes as long as its busiest rank, while an
extra micro-batch costs little without padding; so balance has priority. Without work, samples are
packed in order, and micro-batches are assigned to ranks round-robin.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

KEY_SHARE = 1 / 8
"""Memory of a token that shares the row of another sample's (--share-prefix), over that of a row.

Its keys and values are copied. A layer without recomputation keeps 34 h bytes for a row of h elements
in 16 bits (Korthikanti et al., equation 2) and copies at most 4 h, without grouped queries.
"""

T = TypeVar("T")
Bins = list[list[int]]
Schedule = list[Bins]


def schedule(
    lengths: Sequence[int],
    *,
    data_parallel_size: int,
    max_tokens: int | None,
    micro_batch_size: int,
    multiple_of: int = 1,
    work: Sequence[float] | None = None,
) -> Schedule:
    """Schedule samples of the given ``lengths`` (tokens) on ``data_parallel_size`` ranks.

    Args:
        lengths: tokens of each sample.
        data_parallel_size: number of ranks.
        max_tokens: bound of a micro-batch; None for ``micro_batch_size`` samples each.
        micro_batch_size: samples of a micro-batch without ``max_tokens``.
        multiple_of: divides a rank's number of micro-batches (interleaved pipelines need a multiple
            of their depth).
        work: cost of each sample, in any unit, to balance over the ranks.

    Raises:
        ValueError: the number of samples is not a multiple of ``data_parallel_size * multiple_of``.
            The invariants could then be impossible, if each sample fills a micro-batch.
    """
    unit = check_number(len(lengths), data_parallel_size, multiple_of)
    share = len(lengths) // data_parallel_size
    if work is not None and max_tokens is None:
        count = _up(-(-share // micro_batch_size), multiple_of)
        ranks = _spread(work, data_parallel_size, quota=share)
        packed = [
            _spread(_chosen(work, indices), count, quota=micro_batch_size) for indices in ranks
        ]
        return _named(ranks, packed, work)
    if work is not None and max_tokens is not None:
        # A rank with few long samples may have fewer samples than others need micro-batches.
        # With equal numbers of samples (the quota) that cannot happen.
        for quota in (None, share):
            ranks = _spread(work, data_parallel_size, quota=quota)
            fitting = regroup(
                [_chosen(lengths, indices) for indices in ranks],
                max_tokens=max_tokens,
                multiple_of=multiple_of,
            )
            if fitting is not None:
                return _named(ranks, fitting, work)
    # Without costs, or where no balanced spread fits: fill micro-batches in the order of samples.
    in_order = range(len(lengths))
    if max_tokens is None:
        bins = [list(in_order[i : i + micro_batch_size]) for i in in_order[::micro_batch_size]]
    else:
        bins = first_fit(lengths, in_order, max_tokens)
    _split(bins, lengths, _up(len(bins), unit))
    return [bins[rank::data_parallel_size] for rank in range(data_parallel_size)]


def check_number(number: int, data_parallel_size: int, multiple_of: int) -> int:
    """Return the divisor of the number of samples. Raises ValueError if it does not divide it."""
    unit = data_parallel_size * multiple_of
    if not number or number % unit:
        raise ValueError(
            f"cannot distribute {number} samples evenly over {data_parallel_size} data-parallel ranks "
            f"with a multiple of {multiple_of} micro-batches each; use a multiple of {unit} samples"
        )
    return unit


def sequence_work(length: int, break_even: float = math.inf) -> float:
    """Cost of a sequence in tokens: its tokens, plus causal attention, which is quadratic.

    ``break_even`` is the length at which both are equal: see ``break_even_length``.
    """
    return length * (1 + length / break_even)


def break_even_length(*, num_parameters: int, num_layers: int, attention_width: int) -> float:
    """The sequence length at which causal attention costs as much as all matrix products.

    A token is multiplied with each of the active ``num_parameters``. In each layer its query
    attends to half the sequence's keys and values, of ``attention_width`` (heads x head size): 2 P
    = 2 x 2 x layers x width x length / 2.
    """
    return num_parameters / (num_layers * attention_width)


def lower_bound(lengths: Sequence[int], *, max_tokens: int) -> int:
    """Lower bound on the number of micro-batches.

    Enough for all tokens (each longer sample alone), and one for each sample of more than half the
    limit.
    """
    alone = sum(length > max_tokens for length in lengths)
    tokens = sum(length for length in lengths if length <= max_tokens)
    large = sum(2 * length > max_tokens for length in lengths)
    return max(alone + -(-tokens // max_tokens), large)


def regroup(
    lengths: Sequence[Sequence[int]], *, max_tokens: int, multiple_of: int = 1
) -> list[Bins] | None:
    """Pack each rank's samples into the same number of micro-batches of at most ``max_tokens``.

    Returns:
        For each rank, lists of indices into its ``lengths``, with even sums where the limit allows
        it. None when a rank has fewer samples than another needs micro-batches.
    """
    count = _up(
        max(lower_bound(rank_lengths, max_tokens=max_tokens) for rank_lengths in lengths),
        multiple_of,
    )
    while count <= min(map(len, lengths)):
        packed = [_pack(rank_lengths, max_tokens, count) for rank_lengths in lengths]
        needed = max(map(len, packed))
        if needed <= count:
            return packed
        count = _up(needed, multiple_of)
    return None


def first_fit(lengths: Sequence[int], order: Iterable[int], max_tokens: int) -> Bins:
    """Put each sample, in ``order``, into the first micro-batch with enough capacity.

    O(n log n): a tree holds the largest remaining capacity of each range of micro-batches (Johnson,
    "Near-optimal bin packing algorithms", 1973).
    """
    # Two neighbours together exceed the limit, or the second's first sample would be in the first.
    most = 2 * -(-sum(min(length, max_tokens) for length in lengths) // max_tokens) + 1
    leaves = 1 << (min(most, len(lengths)) - 1).bit_length()
    capacity = [max_tokens] * (2 * leaves)
    bins: Bins = []
    for index in order:
        size = min(lengths[index], max_tokens)
        node = 1
        while node < leaves:
            node *= 2
            if capacity[node] < size:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        capacity[node] -= size
        while node > 1:
            node //= 2
            left, right = capacity[2 * node], capacity[2 * node + 1]
            capacity[node] = left if left > right else right
    return bins


def _pack(lengths: Sequence[int], max_tokens: int, count: int) -> Bins:
    """Pack into ``count`` micro-batches with even sums if these fit.

    Otherwise use a first-fit packing into ``count`` or more.
    """
    bins = _spread(lengths, count, limit=max_tokens)
    if not bins:
        bins = first_fit(lengths, _falling(lengths), max_tokens)
        _split(bins, lengths, count)
    return bins


def _spread(
    sizes: Sequence[float], num_bins: int, *, quota: int | None = None, limit: float = math.inf
) -> Bins:
    """Put each item, largest first, into the bin with the smallest sum.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969. A bin takes at most
    ``quota`` items, and a sum up to ``limit``, except for a single larger item. Returns no bins
    when an item does not fit.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    heap: list[tuple[float, int]] = [(0, number) for number in range(num_bins)]
    for index in _falling(sizes):
        load, number = heap[0]
        if load and load + sizes[index] > limit:
            return []
        bins[number].append(index)
        if len(bins[number]) == quota:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + sizes[index], number))
    return bins


def _falling(sizes: Sequence[float]) -> list[int]:
    # stable: equal ones stay in order
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def _split(bins: Bins, lengths: Sequence[int], count: int) -> None:
    """Split the longest micro-batch of at least two samples in half until there are ``count``."""
    sums = [
        (-sum(_chosen(lengths, one)), number) for number, one in enumerate(bins) if len(one) > 1
    ]
    heapq.heapify(sums)
    while len(bins) < count:
        _, number = heapq.heappop(sums)
        whole = bins[number]
        halves = [_chosen(whole, sorted(half)) for half in _spread(_chosen(lengths, whole), 2)]
        bins[number] = halves[0]
        bins.append(halves[1])
        for half, where in zip(halves, (number, len(bins) - 1), strict=True):
            if len(half) > 1:
                heapq.heappush(sums, (-sum(_chosen(lengths, half)), where))


def _named(ranks: Bins, packed: Sequence[Bins], work: Sequence[float]) -> Schedule:
    """Map positions among a rank's samples to sample indices.

    Micro-batches are sorted by descending work: ranks that share experts run them in step, so
    micro-batches that run together should have similar work.
    """
    named = []
    for own, bins in zip(ranks, packed, strict=True):
        indices = [sorted(_chosen(own, one)) for one in bins]
        named.append(sorted(indices, key=lambda one: -sum(_chosen(work, one))))
    return named


def _chosen(values: Sequence[T], indices: Iterable[int]) -> list[T]:
    return [values[i] for i in indices]


def _up(number: int, multiple: int) -> int:
    return number + -number % multiple
