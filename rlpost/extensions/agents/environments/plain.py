"""Runs environments that are plain Python: ``reset``, then the model's turns and ``step``.

Input: a response builder, a prompt. Output: one sample; the text of the environment is masked.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlpost.errors import ConfigError
from rlpost.extensions.agents.environments.calls import call, call_if_there, close
from rlpost.extensions.agents.environments.protocol import Environment, Step, Turn
from rlpost.extensions.agents.environments.resumption import Resumption
from rlpost.rollout.answer_log import SavedState
from rlpost.rollout.episode_results import EpisodeResult, TurnResult
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.types import Prompt

logger = logging.getLogger(__name__)


class _CannotContinue(Exception):
    """What is recorded of an episode cannot be continued."""


@dataclass(frozen=True)
class PlainRunner:
    """Runs the episodes of one environment. ``make`` returns a new one for each episode."""

    word: str
    make: Callable[[], Environment]
    max_turns: int
    resumption: Resumption = "begun again"

    async def start(self) -> None:
        """Nothing is shared between episodes."""

    async def close(self) -> None:
        """Nothing is shared between episodes."""

    async def run(self, builder: ResponseBuilder, prompt: Prompt) -> EpisodeResult:
        """Run one episode, from where the builder's log has it.

        Raises:
            Halted: generation is suspended.
            ConfigError: the environment returned no ``Step``, or a reward that is not a number.
            Exception: whatever the environment raises.
        """
        if builder.log.saved is not None:
            try:
                return await self._run(builder, prompt, builder.log.saved)
            except _CannotContinue as why:
                logger.warning(
                    "--env %s: %s; the episode of prompt %d, answer %d, is begun again",
                    *(self.word, why, prompt.prompt_id, builder.index),
                )
                builder.log.forget()
                builder = builder.again()
        return await self._run(builder, prompt, None)

    async def _run(
        self, builder: ResponseBuilder, prompt: Prompt, saved: SavedState | None
    ) -> EpisodeResult:
        environment = await call(self.make)
        try:
            opening = await self._open(environment, prompt, saved)
            episode = _Episode(self, environment, builder, saved)
            turns = await episode.play(opening)
            score = await call_if_there(environment, "score", default=0.0)
        finally:
            await close(environment, self.word)
        if not turns:
            raise ConfigError(
                f"--env {self.word}: reset left no token for an answer to prompt {prompt.prompt_id}; shorten its "
                "text, or raise --rollout-max-response-len"
            )
        info = getattr(environment, "info", {})
        return EpisodeResult(
            (builder.sample(),),
            tuple(turns),
            finite(self.word, score, "score"),
            info=info if isinstance(info, Mapping) else {},  # the class may use the name otherwise
        )

    async def _open(
        self, environment: Environment, prompt: Prompt, saved: SavedState | None
    ) -> str:
        """Reset or restore an environment; return the text before the first turn."""
        if saved is None:
            return str(await call(environment.reset, prompt) or "")
        try:
            await call_if_there(environment, "restore", saved.data)
        except Exception as error:  # an environment's code
            raise _CannotContinue(f"restore failed: {type(error).__name__}: {error}") from error
        return str(saved.steps[0]["text"])


class _Episode:
    """One episode of an environment; its first steps may be those of a saved state."""

    def __init__(
        self,
        runner: PlainRunner,
        environment: Environment,
        builder: ResponseBuilder,
        saved: SavedState | None,
    ) -> None:
        self._word, self._max_turns = runner.word, runner.max_turns
        self._keeps_state = runner.resumption == "restored" and builder.log.records
        self._environment, self._builder = environment, builder
        self._recorded = [] if saved is None else list(saved.steps)

    async def play(self, opening: str) -> list[TurnResult]:
        """Let model and environment take turns to the end of the episode."""
        builder, turns = self._builder, list[TurnResult]()
        stop = tuple(getattr(self._environment, "stop", ()))
        await self._keep(0, Step(opening))
        if opening:
            builder.insert(opening)
        while len(turns) < self._max_turns and builder.remaining_tokens:
            began, start = time.monotonic(), builder.num_tokens
            text = await builder.write(stop=stop)
            wrote, end = time.monotonic(), builder.num_tokens
            turn = Turn(
                len(turns),
                text,
                builder.response_ids[start:end],
                builder.finish_reason,
                builder.stopped_at,
            )
            step = await self._step(turn)
            turns.append(
                TurnResult(
                    sample=0,
                    start=start,
                    end=end,
                    text=text,
                    reward=step.reward,
                    said=step.text,
                    tool=step.tool,
                    seconds=wrote - began,
                    env_seconds=time.monotonic() - wrote,
                    before="" if turns else opening,
                )
            )
            if step.done:
                break
            if step.text:
                builder.insert(step.text)
        return turns

    async def _step(self, turn: Turn) -> Step:
        """Return what the environment answers to a turn, or answered when it was recorded."""
        number = turn.number + 1
        if number < len(self._recorded):
            record = self._recorded[number]
            if record["turn"] != _checksum(turn):
                raise _CannotContinue(f"turn {turn.number} is not the one that was answered")
            return Step(record["text"], record["reward"], tool=record["tool"])
        step = await call(self._environment.step, turn)
        if not isinstance(step, Step):
            raise ConfigError(
                f"--env {self._word}: step returned {step!r:.200}; it has to return an "
                "rlpost.extensions.agents.environments.protocol.Step"
            )
        step = replace(step, reward=finite(self._word, step.reward, "the reward of step"))
        if not step.done:
            await self._keep(number, step, turn)
        return step

    async def _keep(self, number: int, step: Step, turn: Turn | None = None) -> None:
        """Record a step with the state after it, unless it comes from a record."""
        if not self._keeps_state or number < len(self._recorded):
            return
        record = {"text": step.text, "reward": step.reward, "tool": step.tool}
        if turn is not None:
            record["turn"] = _checksum(turn)
        self._builder.log.add_step(number, record, await self._state())

    async def _state(self) -> bytes | None:
        """Return the environment's state; None, with a message, if it cannot be saved now."""
        try:
            state = await call_if_there(self._environment, "save")
        except (
            Exception
        ) as error:  # an environment's code; the episode is worth more than its state
            logger.warning(
                "--env %s: save failed: %r; a crash repeats more turns", self._word, error
            )
            return None
        if not isinstance(state, bytes):
            raise ConfigError(
                f"--env {self._word}: save returned {state!r:.200}; it has to return bytes"
            )
        return state


def _checksum(turn: Turn) -> int:
    return zlib.crc32(turn.token_ids.tobytes())


def finite(word: str, reward: Any, what: str) -> float:
    """Return a reward as a number. Raises ConfigError."""
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--env {word}: {what} is {reward!r:.200}; it must be a finite number")
    return number
