"""Rewards in the files of verifiers, and the reward of a task with several steps. Pure.

Source of the rules for steps: Harbor 0.26, harbor/trial/multi_step.py and trial.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

Rewards = Mapping[str, float]
"""Values of a verifier by their names; that of reward.txt is ``reward``."""
REWARD = "reward"
MAX_REWARDS = 256
"""Values of one verifier, which are kept with the episode."""


class RewardUnreadable(ValueError):
    """A verifier's file has no reward."""


def rewards_of(text: str, *, is_json: bool) -> dict[str, float]:
    """Return the rewards in a file of a verifier; values that are no finite number are left out.

    >>> rewards_of(" 0.5 ", is_json=False), rewards_of('{"tests": true}', is_json=True)
    ({'reward': 0.5}, {'tests': 1.0})

    Raises RewardUnreadable if none is left.
    """
    try:
        value = json.loads(text) if is_json else float(text)
    except (ValueError, RecursionError) as error:
        raise RewardUnreadable(f"the reward {text[:80]!r} is not a number: {error}") from None
    values = value if isinstance(value, dict) else {REWARD: value}
    if len(values) > MAX_REWARDS:
        raise RewardUnreadable(f"reward.json has {len(values)} values; at most {MAX_REWARDS} fit")
    rewards = {
        name: number for name, each in values.items() if (number := _number(each)) is not None
    }
    if not rewards:
        raise RewardUnreadable(f"the reward {text[:80]!r} is not a finite number")
    return rewards


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def chosen(rewards: Rewards, key: str) -> float:
    """Return the reward under ``key``, or the only one. Raises RewardUnreadable.

    >>> chosen({"tests": 1.0}, "reward"), chosen({"a": 1.0, "b": 2.0}, "b")
    (1.0, 2.0)
    """
    if key in rewards:
        return rewards[key]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise RewardUnreadable(
        f"reward.json has {', '.join(sorted(rewards))}, and no {key}; name one of them in the "
        "argument reward_key"
    )


def shortfall(rewards: Rewards | None, least: Rewards) -> str:
    """Return which reward is less than it must be for the next step to begin; '' if none is.

    >>> shortfall({"reward": 0.5}, {"reward": 1.0})
    'reward 0.5 is less than 1'
    """
    for name, bound in least.items():
        if rewards is None or name not in rewards:
            return f"there is no {name}"
        if rewards[name] < bound:
            return f"{name} {rewards[name]:g} is less than {bound:g}"
    return ""


def rewards_of_steps(
    verified: Sequence[Rewards | None], least: Sequence[Rewards], strategy: str, key: str
) -> dict[str, float]:
    """Return the rewards of a task by those of its steps.

    The only value of a step counts as its ``key``, so that steps may name theirs differently.

    As in Harbor, ``mean`` is the mean over steps of each value, where a missing one is 0, and
    ``final`` has those of the last step; after a step whose reward lets no other begin, the further
    ones do not count. A step without a reward is 0, and so are those that did not begin because of
    it or because the episode ended: Harbor leaves them out, and a policy would learn to stop there.

    Args:
        verified: the rewards of each step that was verified; None: it has none.
        least: of every step, which the next one needs.
        strategy: ``mean`` or ``final``.
        key: of the value that will be ``chosen``.
    """
    counted = [_under_key(rewards, key) for rewards in verified]
    is_stopped = bool(verified and verified[-1] is not None)
    is_stopped = is_stopped and bool(shortfall(verified[-1], least[len(verified) - 1]))
    if not is_stopped:
        counted += [None] * (len(least) - len(verified))
    if strategy == "final":
        return dict(counted[-1] or {})
    names = dict.fromkeys(name for rewards in counted for name in rewards or {})
    return {
        name: sum((rewards or {}).get(name, 0.0) for rewards in counted) / len(counted)
        for name in names
    }


def _under_key(rewards: Rewards | None, key: str) -> Rewards | None:
    if rewards is None or key in rewards or len(rewards) != 1:
        return rewards
    return {key: next(iter(rewards.values()))}
