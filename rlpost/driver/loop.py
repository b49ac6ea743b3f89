"""The training loop: generate, train, synchronise weights, evaluate, save.

    prompts -> batch of groups -> train -> sync (version checked) -> [evaluate] -> metrics line ->
    [save]

Input: the stages (on a cluster, or fakes in one process), the source of batches, the initial state
and the settings.
Output: the final state. Only the source of batches decides whether generation overlaps with
training.

Invariants:
- The step of a ``RunState`` changes only when its training is complete.
- A checkpoint holds such a state with all pending prompts; the journal holds all later events.
- The metrics line of a step is written exactly once, after the evaluation of the step.
- A stop request ends any phase. The loop saves the last consistent state and raises ``Preempted``.
  When the time left is too short for a checkpoint, the next attempt recovers from the journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from common.garbage import between_steps
from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.config.tree import Config
from rlpost.driver.batches import rollout_metrics, staleness_metrics
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.preemption import StopRequest
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.errors import Fenced, Preempted, RlpostError
from rlpost.observe.driver_lines import nothing_to_learn, progress_line
from rlpost.observe.spans import span
from rlpost.observe.writer import MetricsWriter
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.types import Backlog, SampleGroup

logger = logging.getLogger(__name__)


class Stages(Protocol):
    """The operations of the loop on the cluster. Each may raise Preempted at a consistent point."""

    @abstractmethod
    async def train(self, groups: Sequence[SampleGroup], rollout: int) -> Mapping[str, float]:
        """Run all optimizer steps of ``rollout``, counted from 1; return their metrics."""

    @abstractmethod
    async def sync(self, policy_version: int) -> None:
        """Send the trainer's weights of that version to every engine and check the version on each.

        It is the trainer's current version, or that of the last update
        (``PolicyVersions.engines``).
        """

    @abstractmethod
    async def evaluate(self) -> Mapping[str, float] | None:
        """Return metrics on held-out prompts; None if they follow while the next steps train."""

    @abstractmethod
    async def measure(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return further metrics of ``step``, given those of its phases. Never fails."""

    @abstractmethod
    async def save(self, state: RunState, *, wait: bool) -> None:
        """Commit a checkpoint of ``state`` and of the trainer's weights and optimizer.

        Without ``wait`` the commit may finish in the background; a failed or deferred commit is
        logged and retried later, and training continues. With ``wait`` it is the last save: nothing
        is generated afterwards, and a failure is raised. Raises Fenced when another attempt owns
        the folder.
        """


class Rollouts(Protocol):
    """The source of batches, generated or recorded; see ``rlpost.rollout.collector``."""

    async def batch(self) -> list[SampleGroup]:
        """Return the groups to train next. Raises Preempted."""

    def mark_trained(self) -> None:
        """Record that the last batch is trained."""

    async def prepare_update(self) -> None:
        """Bring generation to a point where the weights may change. Raises Preempted."""

    def wants_weights(self) -> bool:
        """Whether anything may be generated before the next batch is trained."""

    def mark_synced(self, version: int) -> None:
        """Record that the engines generate with the weights of ``version`` from now on."""

    def pending(self) -> tuple[Mapping[str, int], Backlog]:
        """Return the state of the prompt cursor, and all fetched prompts that are not trained."""

    def counts(self) -> Mapping[str, float]:
        """Return counts since the last call, by metric name."""

    async def stop(self) -> None:
        """Abort generation; aborted prompts stay pending."""


class Loop:
    """Trains a run from one state to the next until its last step."""

    def __init__(
        self,
        stages: Stages,
        config: Config,
        *,
        checkpoints: Checkpoints,
        rollouts: Rollouts,
        journal: Journal,
        metrics: MetricsWriter,
        stop: StopRequest,
        versions: PolicyVersions,
        loop_lag: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            checkpoints: where ``stages`` saves.
            versions: of the policy in this attempt.
            loop_lag: returns the event loop's longest delay in seconds since the last call.
        """
        self._stages = stages
        self._config = config
        self._checkpoints = checkpoints
        self._rollouts = rollouts
        self._journal = journal
        self._metrics = metrics
        self._stop = stop
        self._versions = versions
        self._loop_lag = loop_lag
        self.state = RunState()

    async def run(self, state: RunState, *, saved: bool) -> RunState:
        """Train from ``state`` to the last step, save the final state and return it.

        ``saved`` says whether a checkpoint holds ``state`` already. Raises Preempted once a
        checkpoint or, when the time left is too short, the journal is durable.
        """
        first_step, started = state.step, time.monotonic()
        try:
            await self.begin(state, saved=saved)
            while self.state.step < self._num_steps:
                self._stop.check()
                metrics = await self.step()
                steps_done = self.state.step - first_step
                self._report(metrics, steps_done=steps_done, elapsed_s=time.monotonic() - started)
        except Preempted as request:
            await self._leave(request)
            raise
        await self._rollouts.stop()
        await self._save(wait=True)
        return self.state

    async def begin(self, state: RunState, *, saved: bool) -> None:
        """Bring the engines to ``state``, and carry out what its step owes; see ``run``."""
        self.state, self._saved = state, state if saved else None
        self._sent: int | None = None  # the version that engines have
        await self._sync()
        await self._complete_step()

    @property
    def _num_steps(self) -> int:
        config = self._config
        return 0 if config.debug.debug_eval_only else config.rollout.num_rollout

    async def _leave(self, request: Preempted) -> None:
        """Save as much as the time left allows.

        A save that fails does not turn the preemption into a failure.
        """
        await self._rollouts.stop()
        if await self._is_saved(request):
            self._stop.left_with = "checkpoint"
            logger.warning("%s; a checkpoint holds step %d already", request, self.state.step)
        elif self._stop.leave_with(request) == "checkpoint" or not await self._is_journaled():
            await self._save_last(request)
        else:
            logger.warning(
                "%s; step %d is not saved as a checkpoint, the next attempt replays the journal",
                *(request, self.state.step),
            )
        await self._journal.durable()
        if self._stop.left_with == "journal" and not self._journal.is_durable:
            self._stop.left_with = None  # the storage of the journal failed too

    async def _is_saved(self, request: Preempted) -> bool:
        """Whether a checkpoint holds the state, or the save in progress commits it in time."""
        holds_all = self.state.holding(*self._rollouts.pending()) == self._saved
        if not holds_all:
            return False
        try:
            async with asyncio.timeout(self._stop.time_to_save_s()):
                return await self._checkpoints.wait_committed()
        except TimeoutError:
            return False

    async def _is_journaled(self) -> bool:
        """Whether a resume finds everything in the journal; else a late checkpoint is tried."""
        await self._journal.durable()
        if not self._journal.is_durable:
            logger.warning("a resume would not find all of it in the journal: saving a checkpoint")
            self._stop.left_with = "checkpoint"
        return self._journal.is_durable

    async def _save_last(self, request: Preempted) -> None:
        logger.warning("%s; saving step %d", request, self.state.step)
        await self._journal.durable()
        has_journal = self._journal.is_durable  # the save begins a new segment
        try:
            await self._save(wait=True)
        except Fenced:
            raise
        except (RlpostError, OSError) as error:  # Slurm may kill an actor before the driver
            logger.error(
                "the save of step %d failed, earlier checkpoints are kept: %s",
                *(self.state.step, error),
            )
            self._stop.left_with = "journal" if has_journal else None

    async def step(self) -> Mapping[str, float]:
        """Run one step: generate, train, synchronise weights, evaluate and save if due.

        ``begin`` comes first. Returns the metrics of the step.
        """
        metrics: dict[str, float] = {}
        with _timed(metrics, "time/step_s"):
            with _timed(metrics, "time/generate_s"):
                groups = await self._rollouts.batch()
            between_steps()
            self._metrics.show(self.state.step + 1, groups)
            metrics |= {
                **await asyncio.to_thread(rollout_metrics, groups),
                **staleness_metrics(groups, self.state.policy_version),
                **self._rollouts.counts(),
            }
            with _timed(metrics, "time/train_s"):
                metrics |= await self._stages.train(groups, self.state.step + 1)
            self._rollouts.mark_trained()
            self.state = self.state.trained(metrics)
            with _timed(metrics, "time/generate_s"):
                await self._rollouts.prepare_update()
            is_needed = self._rollouts.wants_weights() or self._must_evaluate()
            # Engines that are offloaded lose their weights, and the update restores them.
            has_left = self._config.offload_rollout or self._config.offload_train
            if is_needed and (has_left or self._engine_version != self._sent):
                with _timed(metrics, "time/sync_s"):
                    await self._sync()
            self._rollouts.mark_synced(self._engine_version)
        metrics["time/journal_s"] = self._journal.seconds()
        metrics["time/tokens_per_s"] = metrics["rollout/num_tokens"] / metrics["time/step_s"]
        if self._loop_lag is not None:
            metrics["driver/loop_lag_s"] = self._loop_lag()
            metrics["driver/num_tasks"] = float(len(asyncio.all_tasks()))
        metrics |= await self._stages.measure(self.state.step, metrics)
        self.state = replace(self.state, pending=metrics)
        return await self._complete_step()

    @property
    def _engine_version(self) -> int:
        """The version of the weights that engines generate with after this step."""
        return self._versions.engines(self.state.step)

    async def _sync(self) -> None:
        await self._stages.sync(self._engine_version)
        self._sent = self._engine_version

    async def _complete_step(self) -> Mapping[str, float]:
        """Evaluate if due, write the metrics line of the step, save if due."""
        if self.state.pending is None:
            return {}
        metrics = dict(self.state.pending)
        metrics |= self._journal.evaluation(self.state.step) or {}
        if self._must_evaluate():
            with _timed(metrics, "time/eval_s"):
                evaluation = await self._stages.evaluate()
            if evaluation is not None:
                self._journal.append_evaluation(self.state.step, evaluation)
                metrics |= evaluation
        if metrics:
            await self._metrics.put(self.state.step, metrics)
        self.state = self.state.recorded()
        is_due = self._must_save() or self._checkpoints.is_owed
        if is_due and not self._checkpoints.is_paused:
            await self._save(wait=False)
        return metrics

    def _must_save(self) -> bool:
        interval, step = self._config.checkpoint.save_interval, self.state.step
        if interval is None or step == 0:
            return False
        return step % interval == 0 or self._config.rollout.ends_epoch(step)

    def _must_evaluate(self) -> bool:
        settings, step = self._config.eval, self.state.step
        if settings.eval_interval is None or self._journal.evaluation(step) is not None:
            return False
        if step == 0:
            return not settings.skip_eval_before_train
        rollout = self._config.rollout
        is_last = step == rollout.num_rollout
        return step % settings.eval_interval == 0 or is_last or rollout.ends_epoch(step)

    async def _save(self, *, wait: bool) -> None:
        await self._journal.durable()
        if self._journal.lacks_space and not wait:
            # The journal is on the same disk. A save would fail, and give up the records that wait.
            self._checkpoints.put_off(self.state.step)
            return
        self.state = self.state.holding(*self._rollouts.pending())
        if self.state != self._saved or (wait and not await self._checkpoints.wait_committed()):
            self.state = replace(self.state, journal=await self._journal.begin(self.state.step))
            with span("save"):
                await self._stages.save(self.state, wait=wait)
            self._saved = self.state

    def _report(self, metrics: Mapping[str, float], *, steps_done: int, elapsed_s: float) -> None:
        config = self._config
        line = progress_line(
            self.state.step,
            config.rollout.num_rollout,
            metrics,
            steps_done=steps_done,
            elapsed_s=elapsed_s,
            is_supervised=config.grpo.is_supervised,
        )
        logger.info("%s", line)
        compares = (
            not config.grpo.is_supervised and ESTIMATORS[config.grpo.advantage_estimator].compares
        )
        if compares and nothing_to_learn(metrics, config.rollout.rollout_batch_size):
            logger.info(
                "step %d: all answers of each prompt have the same reward, so nothing was learned; "
                "use prompts of another difficulty, or check the reward function",
                self.state.step,
            )


@contextmanager
def _timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    with span(name.removeprefix("time/").removesuffix("_s")):
        yield
    metrics[name] = metrics.get(name, 0.0) + time.monotonic() - started
