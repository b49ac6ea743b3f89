"""Baseline and loss weights for answers that consist of several samples. Pure.

A generate function may return several samples for one answer, such as the turns of an agent or the
parts of a conversation whose context was shortened. With --loss-unit sample each counts as a
separate sample, so an answer of k samples has k times the weight. With --loss-unit answer they
count as one: the baseline uses the mean of their rewards, all have the same advantage, and the loss
of the answer is the mean over the tokens of all its samples.

Input: groups; the samples of an answer have the same index and are adjacent. Output: an advantage
and a weight per sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from rlpost.algorithm.advantage import Advantage, Masks, Penalties
from rlpost.algorithm.partition import partition
from rlpost.columns import DoubleColumn, FloatColumn, RunColumn
from rlpost.types import SampleGroup

Estimate = Callable[
    [Sequence[Sequence[float]], Masks, Penalties | None], list[tuple[Advantage, ...]]
]
"""Rewards, loss masks and penalties by group -> advantages by group; see ``advantage.estimate``."""


def answer_sizes(group: SampleGroup) -> list[int]:
    """Return the number of samples of each answer of a group, in order."""
    return [
        len(list(own))
        for _, own in itertools.groupby(group.samples, key=lambda scored: scored.sample.index)
    ]


def estimate_by_answer(
    groups: Sequence[SampleGroup], penalties: Penalties | None, estimate: Estimate
) -> list[tuple[Advantage, ...]]:
    """Compute the advantages of all samples; ``estimate`` receives each answer as one sample.

    Advantages per token are split among the samples of the answer.

    Returns:
        Advantages by group.
    """
    sizes = [answer_sizes(group) for group in groups]
    rewards: list[list[float]] = []
    masks: list[list[RunColumn]] = []
    for group, of_group in zip(groups, sizes, strict=True):
        parts = partition(group.rewards, of_group)
        rewards.append([math.fsum(own) / len(own) for own in parts])
        masks.append([_joined_mask(own) for own in partition(group.masks, of_group)])
    answer_advantages = estimate(
        rewards, masks, None if penalties is None else _joined(penalties, sizes)
    )
    return [
        _of_samples(advantages, group, of_group)
        for advantages, group, of_group in zip(answer_advantages, groups, sizes, strict=True)
    ]


def _joined_mask(masks: Sequence[RunColumn]) -> RunColumn:
    return RunColumn(run for mask in masks for run in mask.runs)


def _of_samples(
    advantages: Sequence[Advantage], group: SampleGroup, sizes: Sequence[int]
) -> tuple[Advantage, ...]:
    """Convert the advantages of a group's answers to those of its samples."""
    lengths = [len(scored.sample.mask) for scored in group.samples]
    found: list[Advantage] = []
    for advantage, own in zip(advantages, partition(lengths, sizes), strict=True):
        if isinstance(advantage, FloatColumn):
            found += partition(advantage, own)
        else:
            found += [advantage] * len(own)
    return tuple(found)


def answer_weights(group: SampleGroup) -> list[tuple[float, int]]:
    """Return ``weight`` and ``count`` of each sample, see ``TrainSample``.

    The weight is the sample's share of the answer's loss-masked tokens; the count is 1 for the
    first sample of an answer and 0 for the others.
    """
    lengths = [scored.sample.mask.total() for scored in group.samples]
    found: list[tuple[float, int]] = []
    for own in partition(lengths, answer_sizes(group)):
        total = max(1, sum(own))
        found += [(length / total, int(number == 0)) for number, length in enumerate(own)]
    return found


def _joined(penalties: Penalties, sizes: Sequence[Sequence[int]]) -> list[list[DoubleColumn]]:
    """Concatenate the token penalties of each answer.

    By group and sample -> by group and answer.
    """
    joined = []
    for own, of_answers in zip(penalties, sizes, strict=True):
        columns = [DoubleColumn.of(tokens) for tokens in own]
        joined.append([DoubleColumn.joined(part) for part in partition(columns, of_answers)])
    return joined
