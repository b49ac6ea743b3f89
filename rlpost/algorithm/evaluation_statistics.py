"""Figures of answers, as means over prompts, and their uncertainty. Pure.

Input: the figures of the answers to each prompt. Output: a figure of each prompt, whose mean is the
metric of training, of evaluation and of ``rlpost evaluate``. A prompt counts once, also if gradings
of some of its answers were lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

RIGHT = 1.0
"""The lowest reward of a correct answer."""

Z_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """What metrics count of one answer, however many samples it has.

    ``length`` is in response tokens, those of tools included.
    """

    reward: float
    length: int
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """The mean over the answers to each prompt, by prompt.

    ``pass_at``: by k, over the prompts with at least k answers.
    """

    rewards: list[float]
    lengths: list[float]
    truncated: list[float]
    pass_at: dict[int, list[float]]


def prompt_figures(prompts: Sequence[Sequence[AnswerFigures]]) -> PromptFigures:
    """Return the figures of each prompt; a prompt has at least one answer.

    ``pass_at`` has k of 1, 2, 4, ... and the largest number of answers. An answer is correct if its
    reward is at least RIGHT.

    Raises:
        ValueError: there are no prompts.
    """
    if not prompts:
        raise ValueError("no answers to count")
    most = max(map(len, prompts))
    ks = sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})
    pass_at: dict[int, list[float]] = {k: [] for k in ks}
    for answers in prompts:
        num_right = sum(answer.reward >= RIGHT for answer in answers)
        for k in ks:
            if len(answers) >= k:
                pass_at[k].append(pass_at_k(len(answers), num_right, k))
    return PromptFigures(
        rewards=[mean([answer.reward for answer in answers]) for answers in prompts],
        lengths=[mean([answer.length for answer in answers]) for answers in prompts],
        truncated=[mean([answer.is_truncated for answer in answers]) for answers in prompts],
        pass_at=pass_at,
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return math.fsum(values) / len(values)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from ``num_samples`` answers, ``num_right`` correct.

    1 - C(n - c, k) / C(n, k); Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927, eq. 4); (0, 1) without a trial."""
    if not trials:
        return 0.0, 1.0
    share, square = successes / trials, Z_95**2
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    root = math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    half = Z_95 * root / (1 + square / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % interval.

    Normal, from the standard error; Wilson's where every value is 0 or 1, because the normal one
    collapses when all are equal (Miller, arXiv 2411.00640, sections 2 and 3).
    """
    count, middle = len(values), mean(values)
    if all(value in (0.0, 1.0) for value in values):
        return middle, *wilson(math.fsum(values), count)
    if count == 1:
        return middle, -math.inf, math.inf
    variance = math.fsum((value - middle) ** 2 for value in values) / (count - 1)
    half = Z_95 * math.sqrt(variance / count)
    return middle, middle - half, middle + half
