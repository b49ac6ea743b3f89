"""Advantages: from the rewards of a group to one number a sample. Pure Python.

In: one group's rewards. Out: as many advantages, in the same order. Groups are formed by prompt id upstream, never by
reshaping a flat list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-6


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
