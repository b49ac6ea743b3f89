"""Rewards from servers: functions ``async def reward(prompt, sample, engines)``, and ``remote_rm``.

Input: a function, the clients of the run's groups by name, a prompt and its samples. Output:
rewards. Such a function is called on the driver's event loop, as functions that generate answers
are: it waits for engines most of the time, so hundreds of calls run at the same time, with one
bound, cache and retry for all of them.

Each call to an engine has the deadline of its group. An answer whose engines gave no reply is left
out of its group, as for any reward that depends on another service. A refused request counts the
same: the answer itself, for example its length, may be the cause, and a 0 would be a false reward.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlpost.algorithm.plugin import blamed_on, load_function
from rlpost.algorithm.signatures import Kind, not_async, signature_of, takes_engines
from rlpost.config.checks.functions import declared
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.engines.group_client import EngineClients, GroupClient
from rlpost.errors import ConfigError, GradingLost, RolloutError
from rlpost.tasks.reward.reward_number import reward_number
from rlpost.types import Prompt, Sample

KEY = "--custom-rm-path"


class EngineReward:
    """A reward function that takes ``engines``."""

    def __init__(
        self,
        function: Callable[..., Awaitable[Any]],
        engines: EngineClients,
        rollout: RolloutConfig,
    ) -> None:
        self._function, self._engines, self._rollout = function, engines, rollout

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        """Return the reward of each sample.

        Raises:
            GradingLost: engines gave no reply, or refused a request.
            ConfigError: the function names an unknown group, or --reward-key does not match.
            Exception: whatever the function raises.
        """
        path = self._rollout.custom_rm_path or ""
        try:
            with blamed_on(path, key=KEY):
                if self._rollout.group_rm:
                    rewards = list(await self._function(prompt, samples, engines=self._engines))
                else:
                    (sample,) = samples
                    rewards = [await self._function(prompt, sample, engines=self._engines)]
        except RolloutError as refused:
            raise GradingLost(str(refused)) from refused
        if len(rewards) != len(samples):
            raise ConfigError(
                f"{KEY} {path}: {len(rewards)} rewards for a group of {len(samples)} samples"
            )
        return [self._number(reward) for reward in rewards]

    def _number(self, reward: object) -> float:
        number = reward_number(reward, self._rollout.reward_key, self._rollout.reward_weights)
        if not math.isfinite(number):
            raise ValueError(f"the reward is {number}; it must be finite")
        return number


def engine_reward(rollout: RolloutConfig, engines: EngineClients) -> EngineReward | None:
    """Return the reward of --custom-rm-path if its function takes ``engines``, else None.

    Only such a function is imported in this process. Raises ConfigError.
    """
    path = rollout.custom_rm_path
    kind: Kind = "group reward" if rollout.group_rm else "reward"
    node = None if path is None else declared(path)
    if path is None or node is None or not takes_engines(kind, signature_of(node)):
        return None
    if isinstance(node, ast.FunctionDef):
        raise ConfigError(f"{KEY} {path}: {not_async(node.name)}")
    return EngineReward(load_function(path, key=KEY), engines, rollout)


KEYS = ("reward", "score")


class RemoteReward:
    """The reward model of the group of --rm-url, behind an HTTP server.

    The request is ``{"prompt", "response", "label", "metadata"}`` as JSON; the response is a number,
    or an object with one under ``reward`` or ``score``. ``engines.group_client`` repeats requests.
    """

    def __init__(self, client: GroupClient) -> None:
        self._client = client

    async def score(self, prompt: Prompt, sample: Sample) -> float:
        """Return the reward of a sample.

        Raises:
            GradingLost: see ``GroupClient.post``.
            RolloutError: the server refused the request or did not return a number.
        """
        body = {
            "prompt": prompt.text,
            "response": sample.text,
            "label": prompt.label,
            "metadata": dict(prompt.metadata),
        }
        # metadata from Parquet may hold dates
        answer = await self._client.post("", json.dumps(body, default=str).encode())
        return self._number(answer.decode(errors="replace"))

    def _number(self, text: str) -> float:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict):
            answer = next((answer[key] for key in KEYS if key in answer), None)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(answer, str) and math.isfinite(number := float(answer)):
                return number
        wanted = "a number, or an object with one under 'reward' or 'score'"
        raise RolloutError(f"{self._client.where} answered {text[:500]!r}; it must return {wanted}")
