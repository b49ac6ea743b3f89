"""The loop: generate, train, synchronise, evaluate, save. This page and little else.

    prompts -> batch of groups -> train -> sync (version checked) -> [evaluate] -> metrics line -> [save]

In: the stages (real ones on a cluster, or fakes in one process), the source of batches, the state to start from and
the settings. Out: the state at the end. Whether batches are generated between, beside or across trainings is the
business of the source alone. Invariants: the step of a ``RunState`` changes only when its training is complete; what a
checkpoint holds is such a state, with all prompts that are in hand at that moment, and the journal has what happened
after it; a step's metrics line is written exactly once, after its evaluation. A stop request ends any phase, and the
last consistent state is saved before the loop leaves with ``Preempted``; where time is too short, the journal serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from rlpost.checkpoint.state import RunState
from rlpost.config.tree import Config
from rlpost.errors import Fenced, Preempted, RlpostError
from rlpost.metrics.progress import progress_line
from rlpost.metrics.spans import span
from rlpost.metrics.writer import MetricsWriter
from rlpost.orchestration.batches import rollout_metrics, staleness_metrics
from rlpost.orchestration.preemption import StopRequest
from rlpost.rollout.journal import Journal
from rlpost.types import Backlog, SampleGroup

logger = logging.getLogger(__name__)


class Stages(Protocol):
    """What the loop asks of the cluster. Each may raise Preempted at a point where nothing is half done."""

    async def train(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """All optimizer steps of a rollout; returns their metrics."""

    async def sync(self, policy_version: int) -> None:
        """Bring the trainer's weights to every engine and check the version on each."""

    async def evaluate(self) -> Mapping[str, float]:
        """Metrics on held-out prompts."""

    async def measured(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """More about ``step``, whose phases these ``metrics`` hold. Never fails."""

    async def save(self, state: RunState, *, wait: bool) -> None:
        """Commit a checkpoint that holds ``state`` and the trainer's weights and optimizer; or, unless told to
        ``wait``, see to it that this will be done."""

    def save_is_owed(self) -> bool:
        """Whether a save that was due failed or was put off; it is tried again after the next step."""

    async def settle_saves(self) -> bool:
        """Wait for what the last ``save`` left to be done; False when it failed."""


class Rollouts(Protocol):
    """Where batches come from: ``rlpost.rollout.collector`` has the generated and the recorded ones."""

    async def batch(self) -> list[SampleGroup]:
        """The groups to train next. Raises Preempted."""

    def trained(self) -> None:
        """The last batch is trained."""

    async def settle(self) -> None:
        """Bring generation to where the weights may change. Raises Preempted."""

    def wants_weights(self) -> bool:
        """Whether something may be generated before the next batch is trained."""

    def synced(self, version: int) -> None:
        """The engines have the weights of ``version``, or will have them before they write anything."""

    def in_hand(self) -> tuple[Mapping[str, int], Backlog]:
        """State of the prompt cursor, and all that was fetched before it and is not trained."""

    def counts(self) -> Mapping[str, float]:
        """What happened since the last call, by metric name."""

    async def stop(self) -> None:
        """End what is being generated; it is in hand."""


class Loop:
    """Takes a run from one state to the next until its last step."""

    def __init__(
        self,
        stages: Stages,
        config: Config,
        *,
        rollouts: Rollouts,
        journal: Journal,
        metrics: MetricsWriter,
        stop: StopRequest,
    ) -> None:
        self._stages = stages
        self._config = config
        self._rollouts = rollouts
        self._journal = journal
        self._metrics = metrics
        self._stop = stop
        self.state = RunState()

    async def run(self, state: RunState, *, saved: bool) -> RunState:
        """Train from ``state`` to the last step; ``saved`` tells whether a checkpoint holds it already.

        Returns the final state, saved. Raises Preempted after what there was time for was saved.
        """
        self.state, self._saved = state, state if saved else None
        first, started = state.step, time.monotonic()
        try:
            await self._stages.sync(state.policy_version)
            await self._settle()
            while self.state.step < self._config.rollout.num_rollout:
                self._stop.check()
                metrics = await self._step()
                self._report(metrics, steps_done=self.state.step - first, elapsed_s=time.monotonic() - started)
        except Preempted as request:
            await self._leave(request)
            raise
        await self._rollouts.stop()
        await self._save(wait=True)
        return self.state

    async def _leave(self, request: Preempted) -> None:
        """Save what there is time for. Where that fails, what was saved before serves: a stop stays a stop."""
        await self._rollouts.stop()
        if self._stop.leave_with(request) == "checkpoint":
            logger.warning("%s; saving step %d", request, self.state.step)
            try:
                await self._save(wait=True)
            except Fenced:
                raise
            except (RlpostError, OSError) as error:  # an actor, too, may be killed before the driver
                logger.error("the save of step %d failed, what is committed stays: %s", self.state.step, error)
                self._stop.left_with = "journal"
        else:
            logger.warning("%s; no checkpoint of step %d, the journal serves", request, self.state.step)
        await self._journal.durable()
        if self._stop.left_with == "journal" and not self._journal.is_written:  # its storage failed as well
            self._stop.left_with = None

    async def _step(self) -> Mapping[str, float]:
        """One generate + train + sync round and what follows from it."""
        metrics: dict[str, float] = {}
        with _timed(metrics, "time/step_s"):
            with _timed(metrics, "time/generate_s"):
                groups = await self._rollouts.batch()
            self._metrics.show(self.state.step + 1, groups)
            metrics |= {
                **rollout_metrics(groups),
                **staleness_metrics(groups, self.state.policy_version),
                **self._rollouts.counts(),
            }
            with _timed(metrics, "time/train_s"):
                metrics |= await self._stages.train(groups)
            self._rollouts.trained()
            self.state = self.state.trained(metrics)
            with _timed(metrics, "time/generate_s"):
                await self._rollouts.settle()
            if self._rollouts.wants_weights() or self._must_evaluate():
                with _timed(metrics, "time/sync_s"):
                    await self._stages.sync(self.state.policy_version)
            self._rollouts.synced(self.state.policy_version)
        metrics["time/journal_s"] = self._journal.seconds()
        metrics["time/tokens_per_s"] = metrics["rollout/num_tokens"] / metrics["time/step_s"]
        metrics |= await self._stages.measured(self.state.step, metrics)
        self.state = replace(self.state, pending=metrics)
        return await self._settle()

    async def _settle(self) -> Mapping[str, float]:
        """Evaluate if due, write the metrics line of the step, save if due."""
        if self.state.pending is None:
            return {}
        metrics = dict(self.state.pending)
        metrics |= self._journal.evaluation(self.state.step) or {}
        if self._must_evaluate():
            with _timed(metrics, "time/eval_s"):
                found = await self._stages.evaluate()
            self._journal.evaluated(self.state.step, found)
            metrics |= found
        if metrics:
            await self._metrics.put(self.state.step, metrics)
        self.state = self.state.settled()
        interval = self._config.checkpoint.save_interval
        is_due = interval is not None and self.state.step and self.state.step % interval == 0
        if is_due or self._stages.save_is_owed():
            await self._save(wait=False)
        return metrics

    def _must_evaluate(self) -> bool:
        settings, step = self._config.eval, self.state.step
        if settings.eval_interval is None or self._journal.evaluation(step) is not None:
            return False
        if step == 0:
            return not settings.skip_eval_before_train
        return step % settings.eval_interval == 0 or step == self._config.rollout.num_rollout

    async def _save(self, *, wait: bool) -> None:
        await self._journal.durable()  # with a deadline; a new segment would wait for it without one
        self.state = self.state.holding(*self._rollouts.in_hand())
        if self.state != self._saved or (wait and not await self._stages.settle_saves()):
            self.state = replace(self.state, journal=await self._journal.begin_off_loop(self.state.step))
            with span("save"):
                await self._stages.save(self.state, wait=wait)
            self._saved = self.state

    def _report(self, metrics: Mapping[str, float], *, steps_done: int, elapsed_s: float) -> None:
        total = self._config.rollout.num_rollout
        logger.info("%s", progress_line(self.state.step, total, metrics, steps_done=steps_done, elapsed_s=elapsed_s))


@contextmanager
def _timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    with span(name.removeprefix("time/").removesuffix("_s")):
        yield
    metrics[name] = metrics.get(name, 0.0) + time.monotonic() - started
