"""Reward functions by name: each pure, from an answer and what is known of its prompt to a number.

Input: the text of an answer, the prompt's label and metadata. Output: the reward. A name with ``boxed_`` before
it scores the content of the last ``\\boxed{}`` in place of the whole answer. Some may run for ever on hostile text:
they are *isolated*, which is to say called in a process with a time limit only (``rlpost.reward.pool``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlpost.errors import ConfigError, suggestion
from rlpost.reward.answers import last_boxed
from rlpost.reward.dapo import dapo, same_number
from rlpost.reward.deepscaler import answer_equals, deepscaler
from rlpost.reward.f1 import f1
from rlpost.reward.gpqa import gpqa
from rlpost.reward.gsm8k import gsm8k, number_in_box
from rlpost.reward.ifeval import ifeval
from rlpost.reward.mathverify import boxed_math, math

RewardFunction = Callable[[str, str | None, Mapping[str, Any]], float]

BOXED = "boxed_"
REMOTE = "remote_rm"  # known here by its name; what it is, is asked over HTTP (``rlpost.reward.remote``)

_coin = random.Random()  # its own generator: the global one may be seeded


@dataclass(frozen=True, slots=True)
class Reward:
    """``in_box`` scores an answer that was cut out of its box already; ``score`` does that too unless given."""

    score: RewardFunction
    in_box: RewardFunction | None = None
    isolated: bool = False


def exact_match(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """1 when the answer is the label, white space at either end aside; else 0. Without a label nothing matches."""
    return float(label is not None and response.strip() == label.strip())


def toss(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    """0 or 1, whatever the answer: what a reward that says nothing does to a run."""
    return float(_coin.randint(0, 1))


REWARDS: dict[str, Reward] = {
    "exact_match": Reward(exact_match),
    "deepscaler": Reward(deepscaler, in_box=answer_equals, isolated=True),
    "dapo": Reward(dapo, in_box=same_number),
    "math": Reward(math, in_box=boxed_math, isolated=True),
    "gsm8k": Reward(gsm8k, in_box=number_in_box),
    "gpqa": Reward(gpqa),
    "f1": Reward(f1),
    "ifeval": Reward(ifeval, isolated=True),
    "random": Reward(toss),
}


def reward_function(name: str) -> RewardFunction:
    """The reward function called ``name``, with or without ``boxed_`` before it.

    Raises:
        ConfigError: there is none; naming those there are.
    """
    reward = _named(name)
    if not name.startswith(BOXED):
        return reward.score
    score = reward.in_box or reward.score

    def boxed(response: str, label: str | None, metadata: Mapping[str, Any]) -> float:
        return score(last_boxed(response) or "", label, metadata)

    return boxed


def is_isolated(name: str) -> bool:
    """Whether the function may only be called in a process with a time limit. Raises what ``reward_function`` does."""
    return _named(name).isolated


def _named(name: str) -> Reward:
    plain = name.removeprefix(BOXED)
    if plain not in REWARDS:
        known = ", ".join([*sorted(REWARDS), REMOTE])
        near = suggestion(plain, [*REWARDS, REMOTE])
        raise ConfigError(f"--rm-type {name}: no such reward{near}; known: {known}, and each with {BOXED} before it")
    return REWARDS[plain]
