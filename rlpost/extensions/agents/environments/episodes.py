"""Episodes as answers: a generate function that runs the environment of a prompt.

Input: a response builder and a prompt. Output: the samples of one episode with their rewards, and a
record of the episode.

An episode that fails for a reason outside the answer is started again, and after --env-retries left
out of its group (``GradingLost``). A halted or killed episode continues where the journal has it if its environment can
(``resumption``); otherwise it is generated again from its prompt.
New weights in --rollout-mode fully_async halt nothing; the engine or the builder resumes the turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from common.repeats import Repeats
from rlpost.engines.connection import Halted
from rlpost.errors import ConfigError, DataError, GradingLost, RolloutError
from rlpost.extensions.agents.env_names import EnvName, env_of
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.calls import unless_halted
from rlpost.extensions.agents.environments.resumption import Resumption
from rlpost.extensions.agents.episode_results import EpisodeResult, record_of, rewarded
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.protocol import Pool
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample

logger = logging.getLogger(__name__)

FAILED, MASKED, TIMED_OUT = COUNTED = (
    "env/episodes_failed",
    "env/episodes_masked",
    "env/episodes_timed_out",
)
PAUSE_S = 1.0  # before an episode is started again; doubles


class EpisodeTimeout(GradingLost):
    """An episode took longer than --env-timeout-s."""


class Runner(Protocol):
    """Runs the episodes of one environment. ``resumption`` says how they continue after a crash."""

    @property
    def resumption(self) -> Resumption: ...

    async def start(self) -> None:
        """Prepare for the first episode."""

    async def run(self, builder: ResponseBuilder, prompt: Prompt) -> EpisodeResult:
        """Run one episode; see ``PlainRunner.run``."""

    async def close(self) -> None:
        """Release the resources of ``start``."""


class EnvironmentSet:
    """The environments of a run, with their limits; shared by training and evaluation."""

    def __init__(
        self,
        names: Sequence[EnvName],
        runners: Mapping[str, Runner],
        settings: EnvConfig,
        *,
        sandboxes: Pool | None = None,
        archives: Archives | None = None,
    ) -> None:
        """``runners`` by label; ``sandboxes``: those of all environments, opened before the first."""
        self.names, self.settings = tuple(names), settings
        self._runners = dict(runners)
        self._places = {
            name.label: asyncio.Semaphore(settings.env_concurrency) for name in self.names
        }
        self._started: dict[str, asyncio.Task[None]] = {}
        self._sandboxes, self._archives = sandboxes, archives
        self._opening = asyncio.Lock()
        self._is_open = False

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(name.label for name in self.names)

    async def keep_states(self, states: Sequence[bytes]) -> None:
        """Delete files of sandboxes that none of these states needs."""
        if self._archives is not None:
            await self._archives.keep_only(states)

    def resumes(self, label: str) -> bool:
        """Whether episodes of an environment continue from what is recorded of them."""
        return self._runners[label].resumption != "begun again"

    async def run(self, label: str, builder: ResponseBuilder, prompt: Prompt) -> EpisodeResult:
        """Run an episode once its environment has a free place.

        Raises as ``Runner.run``, and EpisodeTimeout.
        """
        runner, limit_s = self._runners[label], self.settings.env_timeout_s
        async with self._places[label]:
            await self._start(label)
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await runner.run(builder, prompt)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise EpisodeTimeout(
                    f"the episode took more than --env-timeout-s {limit_s:g}"
                ) from error

    async def _start(self, label: str) -> None:
        """Start an environment once; after a failure the next episode tries again."""
        begun = self._started.get(label)
        if begun is None:
            begun = self._started[label] = asyncio.ensure_future(self._begin(label))
        try:
            await asyncio.shield(begun)
        except Exception:
            if self._started.get(label) is begun:
                del self._started[label]
            raise

    async def _begin(self, label: str) -> None:
        async with self._opening:
            if self._sandboxes is not None and not self._is_open:
                await self._sandboxes.__aenter__()
                self._is_open = True
        await self._runners[label].start()

    async def close(self) -> None:
        """Close the environments that were started, then the sandboxes."""
        for label, begun in self._started.items():
            await asyncio.gather(begun, return_exceptions=True)
            await self._runners[label].close()
        self._started.clear()
        if self._sandboxes is not None and self._is_open:
            self._is_open = False
            await self._sandboxes.close()


class Episodes:
    """A generate function; see the module."""

    def __init__(
        self,
        environments: EnvironmentSet,
        *,
        seed: int,
        record: Callable[[dict[str, object]], object] | None = None,
        evaluation: str | None = None,
        pause_s: float = PAUSE_S,
    ) -> None:
        """
        Args:
            seed: of the draw among environments.
            record: called with each record.
            evaluation: the name of the evaluation set, for the records.
        """
        self._environments, self._seed = environments, seed
        self._record, self._evaluation = record, evaluation
        self._pause_s = pause_s
        self._counts: Counter[str] = Counter()
        self._reasons = Repeats()

    async def __call__(
        self, builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams
    ) -> Sequence[Sample]:
        """Return the samples of one episode.

        Raises:
            Halted: generation is suspended.
            GradingLost: the episode failed more than --env-retries times, or took too long.
            RolloutError: a request to an engine failed permanently.
            ConfigError, DataError: the environment or the prompt is wrong.
        """
        del sampling
        settings, label = self._environments.settings, self._label_of(prompt)
        for attempt in range(settings.env_retries + 1):
            began, fresh = time.time(), builder.again()
            try:
                result = await unless_halted(
                    builder.connection, self._environments.run(label, fresh, prompt)
                )
            except (Halted, RolloutError, ConfigError, DataError):
                raise
            except Exception as error:  # the cause is outside the answer
                builder.log.forget()
                why = self._failed(error, label, prompt, began=began, index=builder.index)
                if attempt == settings.env_retries or isinstance(why, EpisodeTimeout):
                    self._counts[MASKED] += 1
                    raise why from error
                pause = asyncio.sleep(self._pause_s * 2**attempt)
                await unless_halted(builder.connection, pause)
                continue
            record = record_of(result)
            self._write(label, prompt, record, began=began, index=builder.index)
            return rewarded(result, label, by_turn=settings.env_reward == "turn")
        raise AssertionError("the last attempt returns or raises")

    def resumes(self, prompt: Prompt) -> bool:
        """Whether the episode of a prompt continues from what is recorded of it."""
        return self._environments.resumes(self._label_of(prompt))

    async def keep_states(self, states: Sequence[bytes]) -> None:
        """Delete files of sandboxes that none of these states needs."""
        await self._environments.keep_states(states)

    def _label_of(self, prompt: Prompt) -> str:
        """Return the label of the environment of a prompt. Raises DataError."""
        settings = self._environments.settings
        return env_of(
            self._environments.labels,
            settings.env_weights,
            metadata=prompt.metadata,
            key=settings.env_key,
            prompt_id=prompt.prompt_id,
            seed=self._seed,
        )

    def counters(self) -> dict[str, float]:
        """Return the counts of episodes since the last call, by metric name."""
        found = {name: float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        return found

    def _failed(
        self, error: Exception, label: str, prompt: Prompt, *, began: float, index: int
    ) -> GradingLost:
        """Count and record a failed attempt; return its error as GradingLost."""
        described = f"{type(error).__name__}: {error}"
        why = error if isinstance(error, GradingLost) else GradingLost(described)
        self._counts[FAILED] += 1
        self._counts[TIMED_OUT] += isinstance(why, EpisodeTimeout)
        count = self._reasons.count(f"{label}: {why}")
        if count is not None:
            often = "" if count == 1 else f" ({count} times for this reason)"
            words = (prompt.prompt_id, label, often, f"{why}"[:2000])
            logger.warning("prompt %d: an episode of %s failed%s: %s", *words)
        outcome = "timeout" if isinstance(why, EpisodeTimeout) else "failed"
        record = {"outcome": outcome, "why": str(why)[:2000], "turns": []}
        self._write(label, prompt, record, began=began, index=index)
        return why

    def _write(
        self,
        label: str,
        prompt: Prompt,
        record: Mapping[str, object],
        *,
        began: float,
        index: int,
    ) -> None:
        if self._record is None:
            return
        head: dict[str, object] = {
            "prompt_id": prompt.prompt_id,
            "index": index,
            "env": label,
            "began": round(began, 3),
            "seconds": round(time.time() - began, 3),
            "prompt": prompt.text,
        }
        if self._evaluation is not None:
            head["evaluation"] = self._evaluation
        self._record({**head, **record})
