"""Grade the responses to a prompt: the single interface between generation and all rewards.

Input: a prompt and its samples. Output: one reward or None for each sample, in order, and counts of
failed gradings.

An answer that makes its grading fail is a wrong answer. If the grading was lost (its process was
killed, the reward server is down) the sample has no reward, because a 0 would bias the baseline.
Neither stalls or ends the rollout. Only a reward that fails on every answer ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlpost.config import extensions
from rlpost.config.engine_groups import REWARD_GROUP
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.plugin_settings import settings_of
from rlpost.config.tree import Config
from rlpost.engines.group_client import EngineClients
from rlpost.errors import NO_FUNCTION_FILE, ConfigError, DataError, GradingLost, RolloutError
from rlpost.tasks.reward.engine_reward import EngineReward, RemoteReward, engine_reward
from rlpost.tasks.reward.pool import (
    GradingFailed,
    GradingPool,
    GradingTimeout,
    What,
    WrongFunction,
)
from rlpost.tasks.reward.registry import (
    REMOTE,
    RewardFunction,
    is_isolated,
    other_rewards,
    reward_function,
)
from rlpost.tasks.reward.worker import is_lost
from rlpost.types import Prompt, Sample

logger = logging.getLogger(__name__)

TIMEOUTS, ERRORS, LOST = COUNTED = (
    "rollout/reward_timeouts",
    "rollout/reward_errors",
    "rollout/reward_lost",
)
FAILURE = 0.0  # the reward of an answer that makes its grading fail
MAX_FAILURES_IN_A_ROW = 64


Rewards = Sequence[float | None]
"""Rewards of samples, in order; None if the grading was lost for a reason outside the answer."""


@dataclass(frozen=True, slots=True)
class NoReward:
    """Why a model gives an answer no reward: the answer is left out.

    ``metric`` counts it; ``cause`` is named when many answers in a row have no reward.
    """

    metric: str
    why: str
    cause: str


class ModelReward(Protocol):
    """A reward of an extension that a model gives (``rlpost.config.extensions.NamedReward``)."""

    compares_answers: bool
    """Whether a reward depends on the other answers to the prompt."""

    async def rewards(
        self, prompt: Prompt, samples: Sequence[Sample]
    ) -> Sequence[float | NoReward]:
        """Return a reward for each sample, in order.

        Raises:
            GradingLost: the model did not answer.
            DataError: the prompt lacks what the model needs.
        """

    def counters(self) -> Mapping[str, float]:
        """Return counts since the last call by metric name."""


class Grader(Protocol):
    """Scores samples."""

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """Return a reward for each sample, in order; None if its grading was lost.

        Calls may be concurrent.

        Raises:
            RolloutError: the reward fails on every answer, or its server refuses the request.
            DataError: the metadata of the prompt names an unknown reward.
        """

    def grades_singly(self, prompt: Prompt) -> bool:
        """Whether ``grade`` needs no other answer and is slow.

        Each answer is then graded once it is complete, and its reward is recorded. Raises DataError
        as ``grade`` does.
        """

    def counters(self) -> Mapping[str, float]:
        """Return counts since the last call by metric name, such as ``rollout/reward_timeouts``."""

    async def close(self) -> None:
        """End the grader's processes and connections."""


class InlineGrader:
    """A pure and fast function, called on the event loop."""

    def __init__(self, score: RewardFunction) -> None:
        self._score = score

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        return [
            float(self._score(sample.text, prompt.label, prompt.metadata)) for sample in samples
        ]

    def grades_singly(self, prompt: Prompt) -> bool:
        return False  # it is fast

    def counters(self) -> Mapping[str, float]:
        """There are no counts: a failure raises an error."""
        return {}

    async def close(self) -> None:
        """There is nothing to close."""


class RewardGrader:
    """Any reward of the settings; ``rm_type`` in a prompt's metadata overrides it."""

    def __init__(self, config: Config, engines: EngineClients | None = None) -> None:
        """``engines``: the clients of the run, which its owner closes; None makes them."""
        self._settings = settings = config.rollout
        self._own_engines = EngineClients.of(config) if engines is None else None
        engines = self._own_engines if engines is None else engines
        assert engines is not None
        self._of_engines = engine_reward(settings, engines)
        self._pool = GradingPool(
            num_workers=settings.reward_workers,
            timeout_s=settings.reward_timeout_s,
            settings=settings_of(config),
        )
        self._remote = None
        if settings.rm_url is not None:
            self._remote = RemoteReward(engines[REWARD_GROUP])
        self._models: dict[str, ModelReward] = {}
        for name, row in extensions.rewards().items():
            model: ModelReward | None = extensions.load(row.make)(config, engines)
            if model is not None:
                self._models[name] = model
        self._counts: Counter[str] = Counter()
        self._failures_in_a_row = 0

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        settings = self._settings
        if self._of_engines is not None:
            parts = [samples] if settings.group_rm else [[sample] for sample in samples]
            scored = await asyncio.gather(
                *(self._by_engines(self._of_engines, prompt, part) for part in parts)
            )
            return [reward for rewards in scored for reward in rewards]
        if settings.custom_rm_path is not None and settings.group_rm:
            return await self._grade_in_process(("group", settings.custom_rm_path), prompt, samples)
        if settings.custom_rm_path is not None:
            return await self._each(("custom", settings.custom_rm_path), prompt, samples)
        name = self._name(prompt)
        if name == REMOTE:
            return await asyncio.gather(
                *(self._remote_reward(prompt, sample) for sample in samples)
            )
        if name in self._models:
            return await self._ask_model(self._models[name], prompt, samples)
        if is_isolated(name):
            return await self._each(("rm", name), prompt, samples)
        return await InlineGrader(reward_function(name)).grade(prompt, samples)

    def grades_singly(self, prompt: Prompt) -> bool:
        """See ``Grader``: a custom reward, one by a server or a model that compares no answers."""
        if self._settings.custom_rm_path is not None:
            return not self._settings.group_rm
        name = self._name(prompt)
        if name in self._models:
            return not self._models[name].compares_answers
        return name == REMOTE

    def counters(self) -> Mapping[str, float]:
        """Return the samples whose grading timed out, failed, or was lost, since the last call."""
        found = {name: float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        for model in self._models.values():
            found.update(model.counters())
        return found

    async def close(self) -> None:
        await self._pool.close()
        if self._own_engines is not None:
            await self._own_engines.close()

    def _name(self, prompt: Prompt) -> str:
        """Return the name of the reward of a prompt."""
        named = prompt.metadata.get("rm_type")
        if not isinstance(named, str) or not named.strip():
            return self._settings.rm_type
        name = named.strip()
        try:
            if name not in other_rewards():
                is_isolated(name)
            elif name == REMOTE and self._settings.rm_url is None:
                raise ConfigError(f"{REMOTE} needs --rm-url")
            elif name != REMOTE and name not in self._models:
                raise ConfigError(f"{name} needs {extensions.rewards()[name].needs}")
        except ConfigError as error:
            raise DataError(
                f"prompt {prompt.prompt_id}: 'rm_type' in its metadata: {error}"
            ) from error
        return name

    async def _remote_reward(self, prompt: Prompt, sample: Sample) -> float | None:
        """Return the reward that the server computes."""
        assert self._remote is not None, "``_name`` refuses remote_rm without --rm-url"
        try:
            reward = await self._remote.score(prompt, sample)
        except GradingLost as failure:
            self._failed(LOST, prompt, [sample], failure)
            return None
        self._failures_in_a_row = 0
        return reward

    async def _by_engines(
        self, reward: EngineReward, prompt: Prompt, samples: Sequence[Sample]
    ) -> Rewards:
        """Return the rewards of a function that uses engines; one call for all ``samples``."""
        try:
            rewards = await reward.grade(prompt, samples)
        except ConfigError:
            raise
        except Exception as error:  # a user's function may raise any type
            lost = is_lost(error)
            words = str(error) if lost else f"{type(error).__name__}: {error}"
            self._failed(LOST if lost else ERRORS, prompt, samples, GradingFailed(words))
            return [None if lost else FAILURE] * len(samples)
        self._failures_in_a_row = 0
        return rewards

    async def _ask_model(
        self, model: ModelReward, prompt: Prompt, samples: Sequence[Sample]
    ) -> Rewards:
        """Return the rewards that a model gives; None for an answer without one."""
        try:
            model_rewards = await model.rewards(prompt, samples)
        except DataError as error:
            raise DataError(f"prompt {prompt.prompt_id}: {error}") from error
        except GradingLost as failure:
            self._failed(LOST, prompt, samples, failure)
            return [None] * len(samples)
        rewards: list[float | None] = []
        for sample, reward in zip(samples, model_rewards, strict=True):
            if isinstance(reward, NoReward):
                lost = GradingLost(reward.why)
                self._failed(reward.metric, prompt, [sample], lost, cause=reward.cause)
                rewards.append(None)
                continue
            self._failures_in_a_row = 0
            rewards.append(reward)
        return rewards

    async def _each(self, what: What, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """Grade each sample separately, so that a failure affects only that sample."""
        scored = await asyncio.gather(
            *(self._grade_in_process(what, prompt, [sample]) for sample in samples)
        )
        return [reward for rewards in scored for reward in rewards]

    async def _grade_in_process(
        self, what: What, prompt: Prompt, samples: Sequence[Sample]
    ) -> Rewards:
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

    def _failed(
        self,
        metric: str,
        prompt: Prompt,
        samples: Sequence[Sample],
        failure: Exception,
        *,
        cause: str | None = None,
    ) -> None:
        """Count and log a failed grading; raise an error after too many in a row.

        ``cause``: of an answer that is left out, beside those whose grading was lost.
        """
        self._counts[metric] += len(samples)
        self._failures_in_a_row += 1
        end = samples[0].text[-200:]
        if metric == LOST:
            cause = "what it depends on is unavailable"
        reward = f"reward {FAILURE:g}" if cause is None else "left out"
        logger.warning(
            "prompt %d: %s: %s; the answer ends in %r", prompt.prompt_id, reward, failure, end
        )
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            cause = cause or "the reward itself is wrong"
            kind = ConfigError if isinstance(failure, WrongFunction) else RolloutError
            raise kind(
                f"{self._failures_in_a_row} consecutive gradings failed: {cause}; the last one: {failure}"
            )


def make_grader(config: Config, engines: EngineClients | None = None) -> Grader:
    """Make the grader of the settings. Its processes start with the first grading that needs them.

    ``engines``: the clients of the run, which its owner closes; None makes them.

    Raises:
        ConfigError: the settings name an unknown reward.
    """
    check_reward(config.rollout)
    return RewardGrader(config, engines)


def check_reward(settings: RolloutConfig) -> None:
    """Check the settings of the reward without loading anything.

    Raises:
        ConfigError: there is no such reward, or its settings are incomplete or conflict.
    """
    if settings.group_rm and settings.custom_rm_path is None:
        raise ConfigError(
            "--group-rm true needs --custom-rm-path, because rewards by name score one answer at a time; add it, or "
            "use --group-rm false"
        )
    if settings.rm_url is not None and not settings.rm_url.startswith(("http://", "https://")):
        raise ConfigError(f"--rm-url {settings.rm_url!r}: must start with http:// or https://")
    if settings.custom_rm_path is not None:
        file = settings.custom_rm_path.rpartition(":")[0]
        if file and not Path(file).is_file():
            raise ConfigError(f"--custom-rm-path {settings.custom_rm_path}: {NO_FUNCTION_FILE}")
        return
    extensions.check_rewards(settings)
    if settings.rm_type not in other_rewards():
        is_isolated(settings.rm_type)
    elif settings.rm_type == REMOTE and settings.rm_url is None:
        raise ConfigError(
            f"--rm-type {REMOTE} needs the address of the reward model; add --rm-url http://HOST:PORT"
        )
