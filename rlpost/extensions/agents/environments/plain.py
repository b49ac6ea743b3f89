"""Runs environments that are plain Python: ``reset``, then the model's turns and ``step``.

Input: a response builder, a prompt. Output: one sample; text and images of the environment are
masked. An image is stored before the record of its step names it.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import ConfigError, GradingLost, ImageError
from rlpost.extensions.agents.environments.calls import call, call_if_there, close
from rlpost.extensions.agents.environments.protocol import Content, Environment, Step, Turn
from rlpost.extensions.agents.environments.resumption import Resumption
from rlpost.extensions.agents.episode_results import EpisodeResult, TurnResult
from rlpost.images.tokens import MARK, KnownImage
from rlpost.rollout.answer_log import SavedState
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.types import Prompt

logger = logging.getLogger(__name__)


class _CannotContinue(Exception):
    """What is recorded of an episode cannot be continued."""


@dataclass(frozen=True, slots=True)
class Added:
    """What an environment added: texts and stored images, in order."""

    parts: tuple[str | KnownImage, ...] = ()

    @property
    def text(self) -> str:
        """All as text, with ``<image>`` for an image."""
        return "".join(part if isinstance(part, str) else MARK for part in self.parts)

    @property
    def images(self) -> tuple[str, ...]:
        """The digests of the images."""
        return tuple(part.hash for part in self.parts if isinstance(part, KnownImage))

    def to_record(self) -> object:
        """Return a JSON value: a text, or a list of texts and images."""
        if not self.images:
            return self.text
        return [
            part if isinstance(part, str) else [part.hash, list(part.grid), part.num_tokens]
            for part in self.parts
        ]

    @classmethod
    def of_record(cls, value: Any) -> Added:
        """The inverse of ``to_record``."""
        if isinstance(value, str):
            return cls((value,) if value else ())
        return cls(
            tuple(
                part if isinstance(part, str) else KnownImage(part[0], tuple(part[1]), part[2])
                for part in value
            )
        )


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
    ) -> Content:
        """Reset or restore an environment; return what it adds before the first turn, if it is new."""
        if saved is None:
            return await call(environment.reset, prompt) or ""
        try:
            await call_if_there(environment, "restore", saved.data)
        except Exception as error:  # an environment's code
            raise _CannotContinue(f"restore failed: {type(error).__name__}: {error}") from error
        return ""


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

    async def play(self, opening: Content) -> list[TurnResult]:
        """Let model and environment take turns to the end of the episode."""
        builder, turns = self._builder, list[TurnResult]()
        stop = tuple(getattr(self._environment, "stop", ()))
        before = await self._open(opening)
        if before.parts:
            builder.insert(before.parts)
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
            step, added = await self._step(turn)
            turns.append(
                TurnResult(
                    sample=0,
                    start=start,
                    end=end,
                    text=text,
                    reward=step.reward,
                    said=added.text,
                    tool=step.tool,
                    seconds=wrote - began,
                    env_seconds=time.monotonic() - wrote,
                    before="" if turns else before.text,
                    images=(*(() if turns else before.images), *added.images),
                )
            )
            if step.done:
                break
            if added.parts:
                builder.insert(added.parts)
            if not builder.remaining_tokens:  # by its turn, or by what followed it
                builder.finish_reason = "length"
        return turns

    async def _open(self, opening: Content) -> Added:
        """Return what the environment adds before the first turn, or added when it was recorded."""
        if self._recorded:
            return Added.of_record(self._recorded[0]["text"])
        added = await self._stored(opening, "reset")
        await self._keep(0, Step(), added)
        return added

    async def _stored(self, content: Content, method: str) -> Added:
        """Store the images of an environment. Raises ConfigError, and GradingLost for a bad image."""
        if isinstance(content, str):
            return Added((content,) if content else ())
        is_content = isinstance(content, Sequence) and not isinstance(content, bytes)
        if not is_content or not all(isinstance(part, str | bytes) for part in content):
            raise ConfigError(
                f"--env {self._word}: {method} returned {content!r:.200} as text; it has to be a str, or a "
                "list of str and bytes of image files"
            )
        images, parts = self._builder.connection.images, list[str | KnownImage]()
        for number, part in enumerate(content, 1):
            if isinstance(part, str):
                parts.append(part)
                continue
            if images is None or not images.frame:
                raise ConfigError(
                    f"--env {self._word}: {method} returned an image, and this run reads text alone; add "
                    '--multimodal-keys \'{"image": "images"}\', or return text'
                )
            try:
                parts.append(await in_daemon(partial(images.keep, part)))
            except ImageError as error:  # a screenshot that failed; another attempt may do better
                raise GradingLost(f"part {number} of what {method} returned: {error}") from error
        return Added(tuple(parts))

    async def _step(self, turn: Turn) -> tuple[Step, Added]:
        """Return what the environment answers to a turn, or answered when it was recorded."""
        number = turn.number + 1
        if number < len(self._recorded):
            record = self._recorded[number]
            if record["turn"] != _checksum(turn):
                raise _CannotContinue(f"turn {turn.number} is not the one that was answered")
            return Step("", record["reward"], tool=record["tool"]), Added.of_record(record["text"])
        step = await call(self._environment.step, turn)
        if not isinstance(step, Step):
            raise ConfigError(
                f"--env {self._word}: step returned {step!r:.200}; it has to return an "
                "rlpost.extensions.agents.environments.protocol.Step"
            )
        step = replace(step, reward=finite(self._word, step.reward, "the reward of step"))
        added = await self._stored(step.text, "step")
        if not step.done:
            await self._keep(number, step, added, turn)
        return step, added

    async def _keep(self, number: int, step: Step, added: Added, turn: Turn | None = None) -> None:
        """Record a step with the state after it, unless it comes from a record."""
        if not self._keeps_state:
            return
        record: dict[str, object] = {
            "text": added.to_record(),
            "reward": step.reward,
            "tool": step.tool,
        }
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
    """Return a reward as a number.

    Raises:
        ConfigError: it is no number: the environment's code is wrong.
        GradingLost: it is not finite, which one answer of a policy may cause.
    """
    must_be = f"--env {word}: {what} is {reward!r:.200}; it must be a finite number"
    try:
        number = float(reward)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise ConfigError(must_be) from None
    if not math.isfinite(number):
        raise GradingLost(must_be)
    return number
