"""Advantages: from the rewards of groups to one number a sample. Pure Python.

In: rewards by group. Out: as many advantages, in the same order. Groups are formed by prompt id upstream, never by
reshaping a flat list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


def grpo_advantages(rewards: Sequence[float], *, normalize_std: bool = True) -> tuple[float, ...]:
    """Group-relative advantages: (r_i - mean) / (std + 1e-6), with the unbiased standard deviation.

    Without ``normalize_std`` only the mean is taken off (Dr. GRPO, arXiv 2503.20783). A group of one, or one whose
    rewards are all equal, has advantages of zero. Source: DeepSeekMath, arXiv 2402.03300, equation 4.1.2.
    """
    count = len(rewards)
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if not normalize_std or count == 1:
        return tuple(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
    return tuple(value / (std + STD_EPSILON) for value in centred)


def centred_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """r_i - mean of the group: the baseline form of REINFORCE++ before whitening."""
    return grpo_advantages(rewards, normalize_std=False)


def rloo_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """Leave one out: r_i less the mean of the others; 0 in a group of one. Source: RLOO, arXiv 2402.14740, eq. 8."""
    count = len(rewards)
    if count == 1:
        return (0.0,)
    total = math.fsum(rewards)
    return tuple(reward - (total - reward) / (count - 1) for reward in rewards)


def whiten(advantages: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """(a - mean) / sqrt(var + 1e-8), with mean and variance over the tokens of the batch: each sample counts as often
    as it has tokens. Source: REINFORCE++, arXiv 2501.03262, section 3."""
    num_tokens = sum(lengths)
    mean = math.fsum(a * n for a, n in zip(advantages, lengths, strict=True)) / num_tokens
    variance = math.fsum((a - mean) ** 2 * n for a, n in zip(advantages, lengths, strict=True)) / num_tokens
    return tuple((a - mean) / math.sqrt(variance + WHITEN_EPSILON) for a in advantages)


def estimate(
    estimator: str, groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], *, normalize_std: bool
) -> list[tuple[float, ...]]:
    """Advantages of all samples of a rollout by the name of the estimator.

    Args: rewards and response lengths (tokens) by group. ``normalize_std`` is for those that compare within a group as
    GRPO does. Returns tuples by group. Raises KeyError for an unknown name.
    """
    within_group = {
        "grpo": lambda rewards: grpo_advantages(rewards, normalize_std=normalize_std),
        "gspo": lambda rewards: grpo_advantages(rewards, normalize_std=normalize_std),
        "cispo": lambda rewards: grpo_advantages(rewards, normalize_std=normalize_std),
        "rloo": rloo_advantages,
        "reinforce_plus_plus": tuple,
        "reinforce_plus_plus_baseline": centred_advantages,
    }[estimator]
    found = [within_group(rewards) for rewards in groups]
    if not estimator.startswith("reinforce_plus_plus"):
        return found
    flat = iter(whiten([a for group in found for a in group], [n for group in lengths for n in group]))
    return [tuple(next(flat) for _ in group) for group in found]
