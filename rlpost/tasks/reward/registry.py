"""Rewards by name that are functions of a text.

Input: the text of an answer, the prompt's label and metadata. Output: the reward.

Extensions have all but the default (``rlpost.config.extensions.TextReward``). With the prefix
``boxed_`` a reward scores the content of the last ``\\boxed{}`` instead of the whole answer. Some may
not terminate on adversarial text: these are *isolated*, that is, called only in a process with a time
limit (``rlpost.tasks.reward.pool``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlpost.config import extensions
from rlpost.config.extensions import BOXED, EXACT_MATCH, TextReward
from rlpost.config.extensions import REMOTE as REMOTE
from rlpost.errors import ConfigError, suggestion
from rlpost.tasks.reward.answer_extraction import after_thinking, last_boxed

RewardFunction = Callable[[str, str | None, Mapping[str, object]], float]


def exact_match(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
    """Return 1 if the answer is the label, without white space around both; else 0.

    A thought before the answer does not count.
    """
    return float(label is not None and after_thinking(response).strip() == label.strip())


REWARDS = {EXACT_MATCH: TextReward("rlpost.tasks.reward.registry:exact_match")}
"""Those of the core: the default of --rm-type."""


def reward_function(name: str) -> RewardFunction:
    """Return the reward function called ``name``, with or without the prefix ``boxed_``.

    Raises:
        ConfigError: there is none; the message lists the known names.
        ImportError: a library that the reward needs is not installed.
    """
    reward, is_boxed = _named(name), name.startswith(BOXED)
    in_box = reward.in_box or reward.score
    score: RewardFunction = extensions.load(in_box if is_boxed else reward.score)
    if not is_boxed:
        return score

    def boxed(response: str, label: str | None, metadata: Mapping[str, object]) -> float:
        return score(last_boxed(response) or "", label, metadata)

    return boxed


def part_of(name: str, part: str) -> Callable[..., Any]:
    """Return a function that a reward consists of. Raises ConfigError as ``reward_function`` does."""
    function: Callable[..., Any] = extensions.load(_named(name).parts[part])
    return function


def label_keys(name: str) -> tuple[str, ...] | None:
    """Return the keys of the metadata that may take the label's place for a reward.

    None if it compares no text with the label, or if no reward here has the name.
    """
    reward = _rewards().get(name.removeprefix(BOXED))
    return None if reward is None else reward.label_keys


def is_isolated(name: str) -> bool:
    """Whether the function may only be called in a process with a time limit.

    Raises:
        ConfigError: see ``reward_function``.
    """
    return _named(name).isolated


def other_rewards() -> tuple[str, ...]:
    """Return the rewards that are no function of a text.

    That of a server (``rlpost.tasks.reward.engine_reward``), and those of models.
    """
    return (REMOTE, *extensions.rewards())


def _rewards() -> dict[str, TextReward]:
    return REWARDS | extensions.text_rewards()


def _named(name: str) -> TextReward:
    plain, rewards = name.removeprefix(BOXED), _rewards()
    if plain in rewards:
        return rewards[plain]
    others = other_rewards()
    known = ", ".join([*sorted(rewards), *others])
    near = suggestion(plain, [*rewards, *others])
    lacks_extension = rewards.keys() == REWARDS.keys()
    remedy = "; this installation has no extension with more" if lacks_extension else ""
    raise ConfigError(
        f"--rm-type {name}: no such reward{near}; known: {known}, each also with the prefix {BOXED}{remedy}"
    )
