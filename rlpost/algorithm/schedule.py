"""The schedule of micro-batches: which sample is trained where and with which others. Pure Python.

In: the lengths of the samples of one optimizer step, the data-parallel size, and either a token limit or a fixed number
of samples. Out: for each rank a list of micro-batches, each a list of sample indices. Invariants:

    1. every sample stands in exactly one micro-batch of one rank;
    2. every rank has the same number of micro-batches and none is empty;
    3. no micro-batch holds more than ``max_tokens``, except one sample that alone is longer.
"""

from __future__ import annotations

from collections.abc import Sequence

Schedule = list[list[list[int]]]


def schedule(
    lengths: Sequence[int],
    *,
    data_parallel_size: int,
    max_tokens: int | None,
    micro_batch_size: int,
    multiple_of: int = 1,
) -> Schedule:
    """Schedule samples of the given ``lengths`` (tokens) on ``data_parallel_size`` ranks.

    With ``max_tokens`` samples are packed up to that many tokens, first fit in order of falling length; without it each
    micro-batch has ``micro_batch_size`` samples. A rank's number of micro-batches is a multiple of ``multiple_of``
    (interleaved pipelines need one of their depth). Raises ValueError when the number of samples is not a multiple of
    both together: then the invariants could not hold when every sample fills a micro-batch of its own.
    """
    unit = data_parallel_size * multiple_of
    if not lengths or len(lengths) % unit:
        raise ValueError(
            f"{len(lengths)} samples cannot be spread evenly over {data_parallel_size} data-parallel ranks "
            f"with a multiple of {multiple_of} micro-batches each"
        )
    if max_tokens is None:
        bins = [
            list(range(i, min(i + micro_batch_size, len(lengths)))) for i in range(0, len(lengths), micro_batch_size)
        ]
    else:
        bins = _first_fit(lengths, max_tokens)
    while len(bins) % unit:
        _split_largest(bins, lengths)
    return _deal(bins, lengths, data_parallel_size)


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if target is None:
            bins.append([])
            room.append(max_tokens)
            target = len(bins) - 1
        bins[target].append(index)
        room[target] -= lengths[index]
    return bins


def _split_largest(bins: list[list[int]], lengths: Sequence[int]) -> None:
    """Split the largest micro-batch of two samples or more into halves of near equal work."""
    number = max(
        (b for b in range(len(bins)) if len(bins[b]) > 1),
        key=lambda b: (sum(lengths[i] for i in bins[b]), -b),
    )
    halves: tuple[list[int], list[int]] = ([], [])
    work = [0, 0]
    for index in sorted(bins[number], key=lambda i: (-lengths[i], i)):
        side = 0 if work[0] <= work[1] else 1
        halves[side].append(index)
        work[side] += lengths[index]
    bins[number] = halves[0]
    bins.append(halves[1])


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int) -> Schedule:
    """Give each rank as many micro-batches, heaviest first to the rank with the least work that still has room."""
    quota = len(bins) // ranks
    dealt: Schedule = [[] for _ in range(ranks)]
    work = [0] * ranks
    for micro_batch in sorted(bins, key=lambda b: (-sum(lengths[i] for i in b), b)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < quota), key=lambda r: (work[r], r))
        dealt[rank].append(sorted(micro_batch))
        work[rank] += sum(lengths[i] for i in micro_batch)
    return dealt
