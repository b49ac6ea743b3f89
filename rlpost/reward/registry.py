"""Reward functions by name: each pure, from an answer and what is known of its prompt to a number.

Comes in: the text of an answer, the prompt's label and metadata. Goes out: the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlpost.errors import ConfigError, suggestion

RewardFunction = Callable[[str, str | None, Mapping[str, Any]], float]


def exact_match(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when the answer is the label, white space at either end aside; else 0. Without a label nothing matches."""
    return float(label is not None and response.strip() == label.strip())


REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
}


def reward_function(name: str) -> RewardFunction:
    """The reward function called ``name``.

    Raises:
        ConfigError: there is none; naming those there are.
    """
    if name not in REWARDS:
        known = ", ".join(sorted(REWARDS))
        raise ConfigError(f"--rm-type {name!r}: no such reward{suggestion(name, REWARDS)}; known: {known}")
    return REWARDS[name]
