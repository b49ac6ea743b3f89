"""Grade the responses to a prompt: the single interface between generation and all rewards.

Input: a prompt and its samples. Output: one number for each sample, in order, or None; and counts of what went
wrong on the way. An answer that makes its grading fail is a wrong answer. One whose grading was lost (its process was
killed, the server of the reward is down) has no reward at all: 0 would be a lie that the baseline believes. Neither
stalls or ends the rollout. Only a reward that fails on every answer does, for then it is the reward that is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlpost.compat.slime.arguments import settings_of
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, DataError, GradingLost, RolloutError
from rlpost.reward.pool import GradingFailed, GradingTimeout, Pool, What, WrongFunction
from rlpost.reward.registry import REMOTE, RewardFunction, is_isolated, reward_function
from rlpost.reward.remote import RemoteReward
from rlpost.types import Prompt, Sample

logger = logging.getLogger(__name__)

TIMEOUTS, ERRORS, LOST = COUNTED = "rollout/reward_timeouts", "rollout/reward_errors", "rollout/reward_lost"
FAILURE = 0.0  # the reward of an answer that makes its grading fail
MAX_FAILURES_IN_A_ROW = 64


Rewards = Sequence[float | None]
"""Of some samples, in order; None: the grading was lost, through no fault of the answer."""


class Grader(Protocol):
    """Scores samples. ``close`` ends what it started."""

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """One reward for each sample, in order; None for one whose grading was lost. Safe to call many times at once.

        Raises:
            RolloutError: the reward fails on every answer, or its server refuses to answer.
            DataError: the prompt asks for a reward that there is not.
        """

    def counters(self) -> Mapping[str, float]:
        """What was counted since the last call, by metric name, such as ``rollout/reward_timeouts``."""

    async def close(self) -> None:
        """End its processes and connections."""


class InlineGrader:
    """A pure and quick function, called where the answer arrives."""

    def __init__(self, score: RewardFunction) -> None:
        self._score = score

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """See ``Grader``."""
        return [float(self._score(sample.text, prompt.label, prompt.metadata)) for sample in samples]

    def counters(self) -> Mapping[str, float]:
        """Nothing can go wrong."""
        return {}

    async def close(self) -> None:
        """Nothing to end."""


class RewardGrader:
    """Any reward of the settings; ``rm_type`` in a prompt's metadata goes before the one of the settings."""

    def __init__(self, config: Config) -> None:
        self._settings = settings = config.rollout
        self._pool = Pool(
            num_workers=settings.reward_workers, timeout_s=settings.reward_timeout_s, settings=settings_of(config)
        )
        self._remote = RemoteReward(settings.rm_url or "", deadline_s=settings.rm_url_timeout_s)
        self._counts: Counter[str] = Counter()
        self._failures_in_a_row = 0

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """See ``Grader``."""
        settings, name = self._settings, self._name(prompt)
        if settings.custom_rm_path is not None and settings.group_rm:
            return await self._isolated(("group", settings.custom_rm_path), prompt, samples)
        if settings.custom_rm_path is not None:
            return await self._each(("custom", settings.custom_rm_path), prompt, samples)
        if name == REMOTE:
            return await asyncio.gather(*(self._asked(prompt, sample) for sample in samples))
        if is_isolated(name):
            return await self._each(("rm", name), prompt, samples)
        return await InlineGrader(reward_function(name)).grade(prompt, samples)

    def counters(self) -> Mapping[str, float]:
        """``rollout/reward_timeouts``, ``rollout/reward_errors`` and ``rollout/reward_lost``, in samples."""
        found = {name: float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        return found

    async def close(self) -> None:
        """See ``Grader``."""
        await self._pool.close()
        await self._remote.close()

    def _name(self, prompt: Prompt) -> str:
        """The name of the reward of a prompt."""
        named = prompt.metadata.get("rm_type")
        if not isinstance(named, str) or not named.strip():
            return self._settings.rm_type
        name = named.strip()
        try:
            if name != REMOTE:
                is_isolated(name)
            elif self._settings.rm_url is None:
                raise ConfigError(f"{REMOTE} needs --rm-url")
        except ConfigError as error:
            raise DataError(f"prompt {prompt.prompt_id}: 'rm_type' in its metadata: {error}") from error
        return name

    async def _asked(self, prompt: Prompt, sample: Sample) -> float | None:
        """The reward of a server."""
        try:
            reward = await self._remote.score(prompt, sample)
        except GradingLost as failure:
            self._failed(LOST, prompt, [sample], failure)
            return None
        self._failures_in_a_row = 0
        return reward

    async def _each(self, what: What, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """Each sample is a grading of its own: a hostile one costs only itself."""
        scored = await asyncio.gather(*(self._isolated(what, prompt, [sample]) for sample in samples))
        return [reward for rewards in scored for reward in rewards]

    async def _isolated(self, what: What, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        try:
            rewards = await self._pool.grade(what, prompt, samples)
        except GradingTimeout as failure:
            self._failed(TIMEOUTS, prompt, samples, failure)
        except GradingFailed as failure:
            self._failed(ERRORS, prompt, samples, failure)
        except GradingLost as failure:
            self._failed(LOST, prompt, samples, failure)
            return [None] * len(samples)
        else:
            self._failures_in_a_row = 0
            return rewards
        return [FAILURE] * len(samples)

    def _failed(self, metric: str, prompt: Prompt, samples: Sequence[Sample], failure: Exception) -> None:
        """Count it, say it, and give up when nothing else happens any more."""
        self._counts[metric] += len(samples)
        self._failures_in_a_row += 1
        end = samples[0].text[-200:]
        reward = "left out" if metric == LOST else f"reward {FAILURE:g}"
        logger.warning("prompt %d: %s: %s; the answer ends in %r", prompt.prompt_id, reward, failure, end)
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            why = "what it needs is away" if metric == LOST else "the reward itself is wrong"
            raise (ConfigError if isinstance(failure, WrongFunction) else RolloutError)(
                f"the last {self._failures_in_a_row} gradings failed, none between them did not: {why}; the last one: "
                f"{failure}"
            )


def make_grader(config: Config) -> Grader:
    """The grader that the settings name. Processes start with the first grading that needs them.

    Raises:
        ConfigError: there is none of that name.
    """
    check_reward(config.rollout)
    return RewardGrader(config)


def check_reward(settings: RolloutConfig) -> None:
    """What can be known wrong about the reward without loading anything.

    Raises:
        ConfigError: no such reward, or settings of it that miss or contradict each other.
    """
    if settings.group_rm and settings.custom_rm_path is None:
        raise ConfigError(
            "--group-rm true needs --custom-rm-path, for rewards by name score one answer at a time; add it, or use "
            "--group-rm false"
        )
    if settings.rm_url is not None and not settings.rm_url.startswith(("http://", "https://")):
        raise ConfigError(f"--rm-url {settings.rm_url!r}: must start with http:// or https://")
    if settings.custom_rm_path is not None:
        file = settings.custom_rm_path.rpartition(":")[0]
        if file and not Path(file).is_file():
            raise ConfigError(
                f"--custom-rm-path {settings.custom_rm_path}: no such file; give FILE.py:FUNCTION or module.function"
            )
        return
    if settings.rm_type != REMOTE:
        is_isolated(settings.rm_type)
    elif settings.rm_url is None:
        raise ConfigError(f"--rm-type {REMOTE} needs the address of the reward model; add --rm-url http://HOST:PORT")
