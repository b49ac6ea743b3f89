"""Samples that begin with the same tokens: what of them is computed once. Pure.

The hidden state of a token depends on the tokens before it alone. So a sample can take the rows of
its first tokens from the sample before it in a micro-batch, and needs rows for the others only: the
answers of a prompt, or the turns of a conversation.

Input: samples in the order of the rollout, where those of a prompt follow each other. Output: the
number of tokens that each takes from its predecessor, and a schedule that keeps such samples
together. Invariants: those of ``schedule``, with ``Prefixes.size`` in place of tokens.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlpost.algorithm.schedule import KEY_SHARE, Schedule, check_number, schedule, sequence_work
from rlpost.columns import IntColumn
from rlpost.types import ImageSpan, Sample, SampleGroup, TrainSample

FEWEST = 8
"""Tokens: fewer are not worth the copies of their keys and values."""


def shared_lengths(samples: Sequence[TrainSample], *, shares: bool = True) -> list[int]:
    """Return how many first tokens each sample has in common with the sample before it.

    All but its last token at most, and 0 instead of less than ``FEWEST``. Images and given routes
    of experts must be equal too, and an image is shared whole. Without ``shares`` all are 0.
    """
    if not shares:
        return [0] * len(samples)
    common = [_common(*pair) for pair in itertools.pairwise(samples)]
    return [0, *(count if count >= FEWEST else 0 for count in common)]


def has_one_prompt(group: SampleGroup) -> bool:
    """Return whether all answers of a group begin with the same prompt, images included."""
    first, *others = (_prompt_of(scored.sample) for scored in group.samples)
    return all(prompt == first for prompt in others)


def _prompt_of(sample: Sample) -> tuple[IntColumn, list[ImageSpan]]:
    length = len(sample.prompt_ids)
    return sample.prompt_ids, [span for span in sample.images if span.start < length]


def _common(before: TrainSample, sample: TrainSample) -> int:
    count = min(len(before.token_ids), len(sample.token_ids) - 1)
    count = _equal(before.token_ids.array, sample.token_ids.array, count)
    if before.routes is not None and sample.routes is not None:
        count = min(count, len(before.routes), len(sample.routes))
        count = _equal(before.routes.array, sample.routes.array, count)
    elif before.routes is not sample.routes:  # one has none
        return 0
    return _up_to_images(before.images, sample.images, count)


def _up_to_images(before: Sequence[ImageSpan], own: Sequence[ImageSpan], count: int) -> int:
    """Return how many of the first ``count`` tokens come before an image that differs or is cut."""
    for pair in itertools.zip_longest(before, own):
        starts = [span.start for span in pair if span is not None]
        is_same = pair[0] == pair[1] and pair[0] is not None and pair[0].end <= count
        if not is_same:
            return min(count, *starts)
    return count


def _equal(one: np.ndarray, other: np.ndarray, count: int) -> int:
    """Return how many of the first ``count`` entries are equal."""
    differs = (one[:count] != other[:count]).reshape(count, -1).any(axis=1)
    return int(differs.argmax()) if differs.any() else count


@dataclass(frozen=True)
class Prefixes:
    """Sizes and work of consecutive samples that share beginnings."""

    lengths: Sequence[int]  # tokens of each sample
    shared: Sequence[int]  # of these, in common with the sample before it
    break_even: float  # see ``schedule.break_even_length``

    def size(self, bundle: range) -> float:
        """Return the memory of consecutive samples in rows; the first one shares nothing."""
        first, *others = bundle
        own = (self.lengths[i] - (1 - KEY_SHARE) * self.shared[i] for i in others)
        return self.lengths[first] + sum(own)

    def work(self, bundle: range) -> float:
        """Return the work of consecutive samples in tokens: see ``sequence_work``."""
        first, *others = bundle
        own = (self._alone[i] - sequence_work(self.shared[i], self.break_even) for i in others)
        return self._alone[first] + sum(own)

    @cached_property
    def _alone(self) -> list[float]:
        return [sequence_work(length, self.break_even) for length in self.lengths]

    def bundles(self, *, limit: float, most: int) -> list[range]:
        """Join samples that share a beginning: at most ``most``, of at most ``limit`` rows."""
        found: list[range] = []
        for index, shared in enumerate(self.shared):
            if found and shared and len(found[-1]) < most:
                joined = range(found[-1].start, index + 1)
                if self.size(joined) <= limit:
                    found[-1] = joined
                    continue
            found.append(range(index, index + 1))
        return found

    def split(self, bundles: Sequence[range], count: int) -> list[range]:
        """Halve the largest bundles until there are ``count``, at most the number of samples."""
        single = [one for one in bundles if len(one) == 1]
        heap = [(-self.size(one), one.start, one.stop) for one in bundles if len(one) > 1]
        heapq.heapify(heap)
        while len(single) + len(heap) < count:
            _, start, stop = heapq.heappop(heap)
            middle = (start + stop) // 2
            for half in (range(start, middle), range(middle, stop)):
                if len(half) == 1:
                    single.append(half)
                else:
                    heapq.heappush(heap, (-self.size(half), half.start, half.stop))
        return sorted([*single, *(range(start, stop) for _, start, stop in heap)], key=min)


def schedule_with_prefixes(
    prefixes: Prefixes,
    *,
    data_parallel_size: int,
    max_tokens: int,
    multiple_of: int,
    balances: bool,
) -> Schedule:
    """Schedule samples so that a shared beginning is computed once where that saves time.

    Samples that stay together save work, and smaller bundles balance better. Of bundles of at most
    n, n / 2, n / 4, ... 1 samples, as they are or with one more for each rank, those are taken with
    which the busiest rank has the least work.
    Arguments and errors as those of ``schedule``; ``balances``: whether it balances work.
    """
    unit = check_number(len(prefixes.lengths), data_parallel_size, multiple_of)
    largest = max(map(len, prefixes.bundles(limit=max_tokens, most=len(prefixes.lengths))))
    best: Schedule = []
    least = math.inf
    for most in _halved(largest):
        joined = prefixes.bundles(limit=max_tokens, most=most)
        fewest = len(joined) + -len(joined) % unit
        for count in range(fewest, min(fewest + unit, len(prefixes.lengths)) + 1, unit):
            bundles = prefixes.split(joined, count)
            work = [prefixes.work(bundle) for bundle in bundles]
            candidate = schedule(
                [math.ceil(prefixes.size(bundle)) for bundle in bundles],
                data_parallel_size=data_parallel_size,
                max_tokens=max_tokens,
                micro_batch_size=1,
                multiple_of=multiple_of,
                work=work if balances else None,
            )
            busiest = max(sum(work[i] for i in itertools.chain(*rank)) for rank in candidate)
            if busiest < least:
                best = [[samples_of(bundles, one) for one in rank] for rank in candidate]
                least = busiest
    return best


def samples_of(bundles: Sequence[range], indices: Sequence[int]) -> list[int]:
    """Return the samples of the bundles at ``indices``."""
    return list(itertools.chain.from_iterable(bundles[i] for i in indices))


def _halved(number: int) -> list[int]:
    """Return n, n / 2, n / 4, ... 1."""
    return [number] if number <= 1 else [number, *_halved(number // 2)]
