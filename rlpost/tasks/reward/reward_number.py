"""Conversion of a reward to a number, by --reward-key or --reward-weights if it is an object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlpost.errors import ConfigError


def reward_number(
    reward: Any, key: str | None, weights: Mapping[str, float] | None = None
) -> float:
    """Return a reward as a number.

    For an object this is the value under ``key``, or with ``weights`` the sum of weight x value
    over their keys.

    Raises:
        ConfigError: an object without --reward-key and --reward-weights, or without such a key; a
            number with --reward-weights.
    """
    if isinstance(reward, Mapping):
        keys = list(weights) if weights else [key]
        missing = [name for name in keys if name is None or name not in reward]
        if missing:
            has = ", ".join(map(str, reward))
            flag = "--reward-weights" if weights else "--reward-key"
            raise ConfigError(
                f"{flag} {missing[0] or 'is not set'}: a reward is an object with the keys {has}; use one"
            )
        if weights:
            return math.fsum(weight * float(reward[name]) for name, weight in weights.items())
        return float(reward[key])
    if weights:
        raise ConfigError(
            f"--reward-weights: a reward is {reward!r:.80}; the function must return an object with "
            f"the keys {', '.join(weights)}"
        )
    return float(reward)
