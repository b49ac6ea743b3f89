"""Reward functions by name: each pure, from an answer and what is known of its prompt to a number.

Comes in: the text of an answer, the prompt's label and metadata. Goes out: the reward.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from rlpost.errors import ConfigError

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
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"--rm-type {name!r}: no such reward; {hint}Known: {', '.join(sorted(REWARDS))}")
    return REWARDS[name]
