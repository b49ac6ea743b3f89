"""Several samples that are one answer together: how they count in the baseline and in the loss. Pure.

An answer function may return several samples for one answer, such as the turns of an agent or the parts of a long
conversation that was made shorter on the way. With --loss-unit sample each of them is a sample like any other, so an
answer of k samples weighs k times. With --loss-unit answer all of them weigh as one: the baseline sees one reward,
their mean; all get its advantage; and the answer's loss is the mean over the tokens of all its samples.

In: groups, whose samples of one answer have the same index and stand together. Out: advantages and weights a sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from rlpost.algorithm.advantage import Advantage, Masks, Penalties
from rlpost.columns import DoubleColumn, FloatColumn, RunColumn
from rlpost.types import SampleGroup

T = TypeVar("T")
Estimate = Callable[[Sequence[Sequence[float]], Masks, Penalties | None], list[tuple[Advantage, ...]]]
"""Rewards, loss masks and penalties by group -> advantages by group; see ``advantage.estimate``."""


def answer_sizes(group: SampleGroup) -> list[int]:
    """How many samples each answer of a group has, in order."""
    return [len(list(own)) for _, own in itertools.groupby(group.samples, key=lambda scored: scored.sample.index)]


def estimate_by_answer(
    groups: Sequence[SampleGroup], penalties: Penalties | None, estimate: Estimate
) -> list[tuple[Advantage, ...]]:
    """Advantages of all samples, by group, where ``estimate`` sees each answer as one sample.

    An advantage for each token, of an estimator that makes such, is dealt out to the samples of the answer again.
    """
    sizes = [answer_sizes(group) for group in groups]
    rewards = [[_mean(own) for own in _parts(group.rewards, of)] for group, of in zip(groups, sizes, strict=True)]
    masks = [[scored.sample.mask for scored in group.samples] for group in groups]
    of_answers = [
        [RunColumn(run for mask in part for run in mask.runs) for part in _parts(own, of)]
        for own, of in zip(masks, sizes, strict=True)
    ]
    found = estimate(rewards, of_answers, None if penalties is None else _joined(penalties, sizes))
    return [
        tuple(
            part
            for advantage, lengths in zip(advantages, _parts([len(mask) for mask in own], of), strict=True)
            for part in _dealt_out(advantage, lengths)
        )
        for advantages, own, of in zip(found, masks, sizes, strict=True)
    ]


def answer_weights(group: SampleGroup) -> list[tuple[float, int]]:
    """(weight, count) of each sample, see ``TrainSample``: its share of the answer's loss-masked tokens, and 1 for the
    first sample of an answer."""
    lengths = [scored.sample.mask.total() for scored in group.samples]
    found: list[tuple[float, int]] = []
    for own in _parts(lengths, answer_sizes(group)):
        total = max(1, sum(own))
        found += [(length / total, int(number == 0)) for number, length in enumerate(own)]
    return found


def _joined(penalties: Penalties, sizes: Sequence[Sequence[int]]) -> list[list[DoubleColumn]]:
    """Penalties of tokens by group and sample -> by group and answer."""
    return [
        [DoubleColumn.joined(map(DoubleColumn.of, part)) for part in _parts(own, of)]
        for own, of in zip(penalties, sizes, strict=True)
    ]


def _parts(values: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    ends = itertools.accumulate(sizes)
    return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _dealt_out(advantage: Advantage, lengths: Sequence[int]) -> list[Advantage]:
    if isinstance(advantage, FloatColumn):
        ends = itertools.accumulate(lengths)
        return [advantage[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return [advantage] * len(lengths)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
