"""Metrics of every step beyond its phases, and traces of selected steps.

Input: the groups of a step and its metrics; actors and engines, which are queried. Output: metrics,
and files in RUN/traces. Invariant: monitoring never fails a run. A process that does not answer is
missing from the metrics line, with a warning in the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rlpost.config.tree import Config
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.model_flops import Flops
from rlpost.driver.weight_coordinator import WeightCoordinator
from rlpost.driver.worker_groups import Actor, ActorGroup, remote
from rlpost.durable.daemon_threads import in_daemon
from rlpost.engines.places import Use
from rlpost.errors import RlpostError
from rlpost.observe import memory
from rlpost.observe.spans import SPANS, ProcessSpans, trace
from rlpost.types import SampleGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")
ASK_S, PROFILE_S, LEAVE_S = 10.0, 300.0, 5.0
"""Deadlines for an answer of all workers, for writing profiles, and for both after a stop
request.
"""


class Observation:
    """Monitors a run. Call ``attach`` once actors and engines have started."""

    def __init__(
        self, config: Config, hf: Mapping[str, object], *, checkpoints: Checkpoints, traces: Path
    ) -> None:
        """Args: ``hf``: the model's config.json; ``traces``: the folder for profiles and traces."""
        self._checkpoints = checkpoints
        self._saved = checkpoints.last  # the newest commit that is already reported
        self._config = config
        self._settings = config.observe
        self._flops = Flops(config, hf)
        self._traces = traces
        self._actors: ActorGroup | None = None
        self._engines: OwnEngines | None = None
        self.groups: Sequence[OwnEngines] = ()
        """The engines of groups beside the policy's."""
        self._weights: WeightCoordinator | None = None
        self._since = SPANS.now()
        self.step = 0
        """The newest trained step."""
        self._begins: dict[int, float] = {}  # start time of each step to trace
        self._is_profiling = False
        self._peak_flops: float | None = None
        self._done = 0.0  # model FLOPs of the step
        self._slow_engines = SlowEngines()

    async def attach(
        self,
        actors: ActorGroup | None,
        engines: OwnEngines | None,
        weights: WeightCoordinator | None,
    ) -> None:
        """Set the actors, engines and weight coordinator to monitor."""
        self._actors, self._engines, self._weights = actors, engines, weights
        if actors is not None:
            self._peak_flops = await actors.first(remote(Actor.peak_flops))

    async def around(self, groups: Sequence[SampleGroup], training: Awaitable[T]) -> T:
        """Await the training of the next step, profiled if the step is selected.

        If training ends early, ``close`` writes the unfinished profile within the time left.
        """
        step, steps = self.step + 1, self._settings.profiled
        if self._actors is not None and step in steps and not self._is_profiling:
            begin = remote(
                Actor.profiling.begin,
                list(self._settings.profile_ranks),
                operators=self._settings.profile,
                memory=self._settings.record_memory_history,
            )
            await self._answer(self._actors.all(begin))
            self._is_profiling, self._first = True, step
        trained = await training
        self._done = self._flops.of(groups, step=step)
        if self._is_profiling and step + 1 not in steps:
            await self._end_profile(step)
        return trained

    async def _end_profile(self, last: int) -> None:
        self._is_profiling = False
        assert self._actors is not None
        end = remote(Actor.profiling.end, str(self._traces), f"{self._first}-{last}")
        for paths in await self._answer(self._actors.all(end), within_s=PROFILE_S) or ():
            for path in paths:
                logger.info("profile: %s", path)

    async def measure(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return throughput, times of the newest sync and checkpoint, and memory after ``step``."""
        self.step = step
        found = pace(metrics, self._config)
        if "time/train_s" in metrics and self._done:
            a_gpu = self._done / metrics["time/train_s"] / self._config.actor_world_size
            found["perf/train_tflops_per_gpu"] = a_gpu / 1e12
            if self._peak_flops is not None:
                found["perf/mfu_frac"] = a_gpu / self._peak_flops
        self._done = 0.0
        found |= self._transfers()
        found |= self._engine_use()
        found |= await self._memory()
        await self._trace(step)
        return found

    def _transfers(self) -> dict[str, float]:
        """Return metrics of the weight update and checkpoint since the previous line."""
        metrics: dict[str, float] = {}
        since, self._since = self._since, SPANS.now()
        if (
            self._weights is not None
            and (seconds := SPANS.seconds("update weights", since=since)) is not None
        ):
            metrics |= {"sync/update_s": seconds, "sync/weights_bytes": self._weights.num_bytes}
        saved, before = self._checkpoints.last, self._saved
        if saved is not None and saved is not before:
            self._saved = saved
            metrics |= {
                "checkpoint/blocking_s": saved.blocking_s,
                "checkpoint/total_s": saved.total_s,
            }
            metrics["checkpoint/written_bytes"] = saved.num_bytes
        return metrics

    def _engine_use(self) -> dict[str, float]:
        """Return how requests were spread over engines; warn of one that has become slow."""
        if self._engines is None:
            return {}
        places = self._engines.serving.places
        use, num_moved = places.take_use()
        paces = places.paces()
        for sentence in self._slow_engines.take(paces):
            logger.warning("%s", sentence)
        return use_metrics(use, num_moved, paces, places.take_peak())

    async def _memory(self) -> dict[str, float]:
        async def own() -> list[dict[str, float]]:
            return [
                {"memory/driver_gb": await asyncio.to_thread(memory.process_gb), **memory.machine()}
            ]

        queries = [own()]
        if self._actors is not None:
            queries.append(self._actors.aside(remote(Actor.memory_use)))
        if self._engines is not None:
            queries.append(self._engines.memory_use())
        queries += [group.memory_use() for group in self.groups]
        answers = await asyncio.gather(*map(self._answer, queries))
        return memory.most([one for answer in answers for one in answer or []])

    async def _answer(self, asking: Awaitable[T], *, within_s: float = ASK_S) -> T | None:
        """Return the result of a query; on failure, log a warning and return None."""
        try:
            return await asyncio.wait_for(asking, within_s)
        except (RlpostError, TimeoutError, OSError) as error:
            logger.warning("not measured: %s: %s", type(error).__name__, error)
            return None

    async def _trace(self, step: int) -> None:
        """Extend the trace of a step until the next begins: it shows evaluation and checkpoint."""
        wanted = self._settings.traced
        if not self._begins and step not in wanted:
            return
        begin = max((one[2] for one in SPANS.since(0.0) if one[0] == "step"), default=SPANS.now())
        if self._begins and step not in wanted:
            await self._write_trace(end=begin)
        elif step in wanted:
            self._begins[step] = begin

    async def _write_trace(self, *, end: float) -> None:
        begins, self._begins = self._begins, {}
        begin = min(begins.values())
        processes = [ProcessSpans("driver", SPANS.since(begin))]
        ranks = None if self._actors is None else self._actors.workers
        for group in (ranks, self._engines, *self.groups):
            if group is not None:
                processes += await self._answer(group.spans(begin)) or []
        path = self._traces / f"steps-{min(begins)}-{max(begins)}.json"

        def write() -> None:
            self._traces.mkdir(mode=0o700, exist_ok=True)
            path.write_text(json.dumps(trace(processes, begin=begin, end=end)))
            logger.info("trace: %s", path)

        await self._answer(in_daemon(write))

    async def close(self, *, is_leaving: bool = False) -> None:
        """Write unfinished traces and profiles.

        With ``is_leaving``, within LEAVE_S: actors that hang must not delay the exit until the
        kill.
        """
        try:
            async with asyncio.timeout(LEAVE_S if is_leaving else None):
                if self._begins:
                    await self._write_trace(end=SPANS.now())
                if self._is_profiling:
                    await self._end_profile(self.step)
        except TimeoutError:
            logger.warning(
                "traces and profiles were not written within %.0f s and are lost", LEAVE_S
            )


def pace(metrics: Mapping[str, float], config: Config) -> dict[str, float]:
    """Return the throughput of a step, from its phases. Pure."""
    step_s = metrics.get("time/step_s")
    if not step_s:
        return {}
    gpus = config.actor_world_size + config.num_group_gpus
    gpus += 0 if config.cluster.colocate else config.rollout_num_gpus
    return {
        "time/tokens_per_s_per_gpu": metrics.get("rollout/num_tokens", 0.0) / step_s / gpus,
        "time/trainer_waits_frac": max(0.0, 1 - metrics.get("time/train_s", 0.0) / step_s),
        "time/generation_waited_frac": metrics.get("time/generate_s", 0.0) / step_s,
    }


def run_metrics(ledger: Iterable[Mapping[str, object]]) -> dict[str, float]:
    """Return the metrics of the ledger that every line of an attempt contains. Pure."""
    entries = list(ledger)
    events = [entry.get("event") for entry in entries]
    return {
        "run/num_attempts": events.count("started"),
        "run/num_preemptions": events.count("preempted"),
        "run/num_engine_restarts": sum(map(num_engine_restarts, entries)),
    }


def num_engine_restarts(entry: Mapping[str, object]) -> int:
    """Return the number of engine restarts that an entry of the ledger records. Pure."""
    engines = entry.get("engines")
    is_restart = entry.get("event") == "recovered" and entry.get("role") == "engine"
    return len(engines) if is_restart and isinstance(engines, list) else 0


def steps_again(lines: Iterable[Mapping[str, float]], *, step: int) -> dict[str, float]:
    """Return the ``steps`` that an attempt which starts from ``step`` trains again. Pure.

    ``step_s`` are the seconds that they took the first time, from the metrics of earlier attempts.
    """
    again = [line.get("time/step_s", 0.0) for line in lines if line["step"] > step]
    return {"steps": len(again), "step_s": round(sum(again), 3)}


SLOW, FEW_ENGINES, SLOW_OF_FEW = 1.3, 4, 3.0
"""An engine is slow from SLOW times the median's time for a token on; among fewer than FEW_ENGINES,
where the median follows each of them, from SLOW_OF_FEW times on."""
SLOW_STEPS = 3  # consecutive steps after which a slow engine is reported: load passes


def use_metrics(
    use: Mapping[str, Use], num_moved: int, paces: Mapping[str, float], peak: float
) -> dict[str, float]:
    """Return the metrics of a step; those that need an answer lack without one.

    ``peak``: the most tokens to come of all requests in flight.
    """
    num_input = sum(one.num_input for one in use.values())
    tokens = [one.num_generated for one in use.values()]
    metrics: dict[str, float] = {
        "engines/conversations_moved": num_moved,
        "engines/tokens_in_flight_max": peak,
    }
    if sum(tokens):
        metrics["engines/imbalance"] = max(tokens) / statistics.fmean(tokens)
    if num_input:
        cached = sum(one.num_cached for one in use.values())
        metrics["engines/prefix_hit_frac"] = cached / num_input
    if paces:
        metrics["engines/slowest_pace"] = min(paces.values())
    return metrics


class SlowEngines:
    """Reports an engine once, after it has been slow in SLOW_STEPS consecutive steps."""

    def __init__(self) -> None:
        self._slow_for: dict[str, int] = {}  # steps, by URL

    def take(self, paces: Mapping[str, float]) -> list[str]:
        """Return a sentence for each engine to report.

        ``paces``: of one step, tokens a second of each engine over the median of all, by URL.
        """
        limit = SLOW if len(paces) >= FEW_ENGINES else SLOW_OF_FEW
        slow = {url: 1 / pace for url, pace in paces.items() if pace * limit <= 1}
        if len(paces) < 2:
            slow = {}
        self._slow_for = {url: self._slow_for.get(url, 0) + 1 for url in slow}
        return [
            f"engine {url} has needed {slow[url]:.1f} x the median engine's time for a token "
            f"for {SLOW_STEPS} steps; check its node"
            for url, num_steps in self._slow_for.items()
            if num_steps == SLOW_STEPS
        ]
