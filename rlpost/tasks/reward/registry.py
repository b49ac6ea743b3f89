"""Reward functions by name. Pure.

Input: the text of an answer, the prompt's label and metadata. Output: the reward.

With the prefix ``boxed_`` a reward scores the content of the last ``\\boxed{}`` instead of the whole
answer. Some may not terminate on adversarial text: these are *isolated*, that is, called only in a
process with a time limit (``rlpost.tasks.reward.pool``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlpost.config import extensions
from rlpost.errors import ConfigError, suggestion
from rlpost.tasks.reward.answer_extraction import after_thinking, last_boxed
from rlpost.tasks.reward.dapo import dapo, same_number
from rlpost.tasks.reward.deepscaler import answer_equals, deepscaler
from rlpost.tasks.reward.f1 import f1
from rlpost.tasks.reward.gpqa import gpqa
from rlpost.tasks.reward.gsm8k import gsm8k, number_in_box
from rlpost.tasks.reward.ifeval import ifeval
from rlpost.tasks.reward.mathverify import boxed_math, math

RewardFunction = Callable[[str, str | None, Mapping[str, object]], float]

BOXED = "boxed_"
REMOTE = "remote_rm"
"""Computed by a server (``rlpost.tasks.reward.engine_reward``), so only its name is known here."""

_coin = random.Random()  # a separate generator, because the global one may be seeded


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function. ``in_box`` scores the content of a box; None: ``score`` does.

    ``label_keys``: keys of the metadata that may take the label's place; None if no text is
    compared with the label.
    """

    score: RewardFunction
    in_box: RewardFunction | None = None
    isolated: bool = False
    label_keys: tuple[str, ...] | None = ()


def exact_match(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if the answer is the label, without white space around both; else 0.

    A thought before the answer does not count.
    """
    return float(label is not None and after_thinking(response).strip() == label.strip())


def toss(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 0 or 1 at random, as a baseline without a signal."""
    return float(_coin.randint(0, 1))


REWARDS: dict[str, Reward] = {
    "exact_match": Reward(exact_match),
    "deepscaler": Reward(deepscaler, in_box=answer_equals, isolated=True),
    "dapo": Reward(dapo, in_box=same_number),
    "math": Reward(math, in_box=boxed_math, isolated=True),
    "gsm8k": Reward(gsm8k, in_box=number_in_box),
    "gpqa": Reward(gpqa, label_keys=("correct_letter", "correct_answer", "answer_text")),
    "f1": Reward(f1),
    "ifeval": Reward(ifeval, isolated=True, label_keys=None),
    "random": Reward(toss, label_keys=None),
}


def reward_function(name: str) -> RewardFunction:
    """Return the reward function called ``name``, with or without the prefix ``boxed_``.

    Raises:
        ConfigError: there is none; the message lists the known names.
    """
    reward = _named(name)
    if not name.startswith(BOXED):
        return reward.score
    score = reward.in_box or reward.score

    def boxed(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
        return score(last_boxed(response) or "", label, metadata)

    return boxed


def label_keys(name: str) -> tuple[str, ...] | None:
    """Return the keys of the metadata that may take the label's place for a reward.

    None if it compares no text with the label, or if no reward here has the name.
    """
    reward = REWARDS.get(name.removeprefix(BOXED))
    return None if reward is None else reward.label_keys


def is_isolated(name: str) -> bool:
    """Whether the function may only be called in a process with a time limit.

    Raises:
        ConfigError: see ``reward_function``.
    """
    return _named(name).isolated


def other_rewards() -> tuple[str, ...]:
    """Return the rewards that are no function of a text: of a server, or of a model."""
    return (REMOTE, *extensions.rewards())


def _named(name: str) -> Reward:
    plain = name.removeprefix(BOXED)
    if plain not in REWARDS:
        others = other_rewards()
        known = ", ".join([*sorted(REWARDS), *others])
        near = suggestion(plain, [*REWARDS, *others])
        raise ConfigError(
            f"--rm-type {name}: no such reward{near}; known: {known}, each also with the prefix {BOXED}"
        )
    return REWARDS[plain]
