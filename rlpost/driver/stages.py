"""The stages of a full run: actors and engines in Ray workers.

Input: settings, the cluster that the agents started, the run's folder. Output: an implementation of
``loop.Stages``. The slow parts of the startup (imports of every rank, engine start) run
concurrently under one deadline.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.fleet_name import POLICY
from rlpost.driver.background_evaluation import (
    BackgroundEvaluation,
    EvaluatingEngines,
    SnapshotWeights,
)
from rlpost.driver.engines.engine_events import EngineEvents
from rlpost.driver.engines.engine_health import EngineHealth
from rlpost.driver.engines.joining import JoinParts, joining_engines
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.loop import Rollouts
from rlpost.driver.lost_nodes import LostNodes
from rlpost.driver.offload import Offload
from rlpost.driver.placement import Placement, Ports
from rlpost.driver.run_stages import RunStages
from rlpost.driver.spare_engines import SpareEngines
from rlpost.driver.standby import Standby
from rlpost.driver.trainer_ranks import TrainerRanks
from rlpost.driver.trainer_recovery import TrainerRecovery
from rlpost.driver.weight_coordinator import WeightCoordinator
from rlpost.driver.worker_groups import Actor, remote
from rlpost.driver.workers import offer_of
from rlpost.durable.daemon_threads import in_daemon
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.durable.trained_batches import RecordedBatches, TrainedBatches
from rlpost.engines.engine_side_weights import PauseMode
from rlpost.types import SampleGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClusterStages(RunStages):
    """Generates, trains, syncs, evaluates and saves on a cluster."""

    _evaluations: BackgroundEvaluation | None = None

    async def start(self, checkpoint: Path | None) -> None:
        """Start actors and engines; load ``checkpoint`` or the Hugging Face weights."""
        started = time.monotonic()
        config, startup = self.config, self.startup
        placement, ports = startup.layout()
        num_ranks = len(placement.actors)
        num_engines = len(placement.all_engines)
        logger.info("starting %d actor ranks and %d engines", num_ranks, num_engines)
        self._engines = OwnEngines(config, self.cluster, placement, ports)
        self.closing.callback(self._engines.close)
        self.create_groups(placement, ports)
        await startup.within_deadline(self.create_ranks(placement))
        self._actors = self.ranks
        self._offload = Offload(config, self._actors, self._engines)
        # Other groups may load for many minutes on nodes of their own.
        await asyncio.gather(
            self._start_policy(placement, ports, checkpoint),
            startup.within_deadline(self.groups.start()),
        )
        await self.stop.unless_requested(self.generation.connect(self._engines.serving))
        weights = WeightCoordinator(
            config,
            self._engines,
            self._actors,
            placement=placement,
            ports=ports,
            folder=Path(self.cluster.attempt_dir) / "weights",
            stop=self.stop,
            incarnation=self.cluster.incarnation,
        )
        self.closing.push_async_callback(weights.close)
        self._nodes = LostNodes(
            self.cluster, offer=offer_of, joined=startup.add_node, record=self.record
        )
        await startup.within_deadline(weights.connect())
        parts = JoinParts(
            self.cluster,
            self._engines.serving.places,
            hf=self.hf,
            export=self._actors.write_engine_folder,
            check=self.checkpoints.check_owner,
            record=self.record,
        )
        self._joining = joining_engines(config, parts)
        self._engine_health = EngineHealth(
            config,
            self._engines,
            weights,
            stop=self.stop,
            check_others=self._joining.check_any,
            nodes=self._nodes,
            events=EngineEvents(self.record),
            weights_onloaded=self._offload.weights_onloaded,
            before_start=self._offload.offload_trainer,
        )
        self.closing.push_async_callback(self._joining.close)
        self._watch_groups()
        await self._begin_recovery(placement, ports, weights)
        self.observation.groups = [*self.groups.engines.values()]
        await self.observation.attach(self._actors, self._engines, weights)
        await self.follow_engines(self._engines)
        logger.info("actors and engines ready after %.1f s", time.monotonic() - started)

    async def _start_policy(
        self, placement: Placement, ports: Ports, checkpoint: Path | None
    ) -> None:
        """Start the trainer and the policy's engines, within the deadline."""
        startup, num_ranks = self.startup, len(placement.actors)
        trainer = self.start_trainer(placement, ports, checkpoint)
        if self.config.cluster.colocate:  # engines measure free memory, so the ranks start first
            await startup.within_deadline(trainer)
            await startup.within_deadline(self._start_engines(num_ranks))
        else:
            await startup.within_deadline(trainer, self._start_engines(num_ranks))

    async def _begin_recovery(
        self, placement: Placement, ports: Ports, weights: WeightCoordinator
    ) -> None:
        """Restart ranks that die from now on, instead of ending the attempt."""
        ranks = TrainerRanks(
            self.startup,
            ports,
            self.ranks,
            offload=self._offload,
            weights=weights,
            engine_health=self._engine_health,
            standby=Standby(self.startup, wanted=self.config.cluster.trainer_standby),
        )
        self.recovery = TrainerRecovery(
            self.config,
            self.ranks,
            ranks,
            placement=placement,
            checkpoints=self.checkpoints,
            stop=self.stop,
            record=self.record,
            nodes=self._nodes,
        )
        self.closing.push_async_callback(self.recovery.close)
        await self.recovery.begin(self.training)
        cluster = self.config.cluster
        if cluster.spare_nodes:
            ranks_recover = cluster.max_trainer_recoveries > 0
            await self._nodes.begin(placement, ranks_recover=ranks_recover)
            self.closing.push_async_callback(self._nodes.close)

    def _watch_groups(self) -> None:
        """Watch the groups of engines; prepare the evaluations beside training."""
        config, name = self.config, self.config.eval.eval_engines
        load_adapters = config.sends_adapters
        timeout_s = 60.0 * config.cluster.distributed_timeout_minutes
        weights: dict[str, SnapshotWeights] = {}
        if name is not None and name != POLICY:
            weights[name] = SnapshotWeights(
                self.groups.engines[name],
                self.groups.jobs.get(name),
                load_adapters=load_adapters,
                timeout_s=timeout_s,
            )
        self.groups.watch(stop=self.stop, nodes=self._nodes, weights=weights)
        if name is None:
            return
        health: EvaluatingEngines
        if name == POLICY:
            health = spare = SpareEngines(
                self._engines,
                self._engine_health,
                config.eval.eval_policy_engines,
                load_adapters=load_adapters,
                timeout_s=timeout_s,
            )
            serving, weights[name] = spare.serving, spare.weights
        else:
            health, serving = self.groups.health[name], self.groups.engines[name].serving
        self._evaluations = BackgroundEvaluation(
            self.run_folder / "eval_weights",
            health,
            weights[name],
            lambda step: self.generation.evaluate(step=step, engines=serving),
        )
        self.closing.push_async_callback(self._evaluations.close)

    async def _start_engines(self, num_ranks: int) -> None:
        gpus = [""] * num_ranks
        if self.config.cluster.colocate:
            gpus = await self._actors.all(remote(Actor.visible_gpu))
            await self._offload.offload_trainer()
        await self._engines.start(gpus)

    def rollouts(self, state: RunState, journal: Journal) -> Rollouts:
        """Return the source of batches, resumed from ``state``.

        Engines and ranks are watched while it generates.
        """
        self.observation.step = state.step
        self.recovery.resume(state.step, self.versions, partial(self._batches_again, journal))
        return self.generation.rollouts(state, journal, self.versions, self._watch)

    async def _watch(self, generating: Awaitable[T]) -> T:
        """Await ``generating``; restart engines and idle ranks that die before it ends."""

        async def with_ranks() -> T:
            async with self.recovery.watch():
                return await generating

        return await self._engine_health.over(self.groups.over(with_ranks()))

    async def _batches_again(
        self, journal: Journal, state: RunState, checkpoint: Path | None, until: int
    ) -> TrainedBatches:
        """The batches after ``state``, which ``checkpoint`` holds, before step ``until``."""
        recording = self.config.debug.load_debug_rollout_data
        if recording is not None:
            return RecordedBatches(recording)
        return await journal.trained_since(
            self.checkpoints.journal_segment(checkpoint, state),
            state.step,
            backlog=state.backlog.finished,
            until=until,
        )

    async def train(self, groups: Sequence[SampleGroup], rollout: int) -> Mapping[str, float]:
        """Run the optimizer steps of a rollout."""
        self.stop.check()
        if self._evaluations is not None:
            self._evaluations.check()

        async def train() -> Mapping[str, float]:
            await self.stop.unless_requested(self._joining.wait_for_write())
            await self._offload.train()
            training = self.recovery.training.train(groups, rollout, self.versions)
            return await self.observation.around(groups, training)

        metrics = await self.recovery.over("train", train)
        self.recovery.note_step(rollout)
        self._engine_health.note_version(self.versions.engines(rollout))
        self.generation.note_version(self.versions.engines(rollout))
        self.groups.forget_restarts()
        return metrics

    async def sync(self, policy_version: int) -> None:
        """Send the weights to every engine and check the version on each."""
        self.stop.check()
        self._policy_version = policy_version
        self.generation.note_version(policy_version)
        is_writing = self.config.rollout.rollout_mode == "fully_async"
        pause: PauseMode = self._engines.pause_mode if is_writing else "abort"
        # Offloaded actors write the weights for other jobs before their own engines generate.
        is_leaving = self.config.offload_train

        async def ready() -> None:
            if is_leaving:
                await self._joining.write(policy_version)
            await self._offload.generate()

        async def update() -> None:
            await self.stop.unless_requested(self._joining.before())
            await self._engine_health.update(
                policy_version, pause=pause, before=self._offload.send, ready=ready
            )

        await self.recovery.over("sync", update)
        if is_leaving:
            await self._joining.publish(policy_version)
        else:
            self._joining.in_background(policy_version)
        await self.stop.unless_requested(self._joining.enough(self._engine_health.num_serving))

    async def evaluate(self) -> Mapping[str, float] | None:
        """Return means on every held-out set, as ``eval/SET/name``.

        With --eval-engines return None as soon as the weights for them are written.
        """
        if self._evaluations is None:
            return await self._watch(self.generation.evaluate())
        step, version = self.observation.step, self._policy_version
        is_last = step == self.config.rollout.num_rollout

        async def write(folder: str) -> None:
            async def write_weights() -> None:
                await in_daemon(lambda: shutil.rmtree(folder, ignore_errors=True))
                async with self._offload.save():
                    await self._actors.write_engine_folder(folder, version)

            await self._saving(write_weights, is_last=False)

        await self._evaluations.begin(step, version, write, is_last=is_last)
        return None

    async def resume_evaluations(
        self, step: int, done: Callable[[int, Mapping[str, float]], Awaitable[None]]
    ) -> None:
        if self._evaluations is not None:
            await self._evaluations.resume(step, done)

    async def _finish_evaluations(self) -> None:
        """Wait for evaluations beside training. Raises Preempted."""
        if self._evaluations is None:
            return
        finishing: Awaitable[None] = self._evaluations.finish()
        if self.config.eval.eval_engines == POLICY:
            finishing = self._engine_health.over(finishing)
        await self.stop.unless_requested(finishing)

    async def save(self, state: RunState, *, wait: bool) -> None:
        """Commit with weights and optimizer on the trainer's devices."""

        async def save() -> None:
            at_rest = self._offload.save(is_last=wait)
            await self.save_ranks(state, wait=wait, at_rest=at_rest)

        await self._saving(save, is_last=wait)

    async def _saving(self, save: Callable[[], Awaitable[None]], *, is_last: bool) -> None:
        """Await ``save``, repeated after a death of ranks; engines then generate as before."""
        were_serving = self._offload.engines_hold_gpus()
        await self.recovery.over("save", save)
        if were_serving and not is_last and not self._offload.engines_hold_gpus():
            await self._bring_engines_back()

    async def _bring_engines_back(self) -> None:
        """Onload the engines, which lost their weights when ranks on their GPUs were restarted."""

        async def update() -> None:
            await self._engine_health.update(
                self._policy_version,
                pause="abort",
                before=self._offload.send,
                ready=self._offload.generate,
            )

        await self.recovery.over("sync", update)

    async def weights_hash(self) -> str:
        """Return a hash of the trainer's weights under their Hugging Face names.

        The run is done then: evaluations beside training are awaited, and engines in other jobs
        may leave.
        """
        await self._finish_evaluations()
        self._joining.end()
        self.groups.end()

        async def weights_hash() -> str:
            async with self._offload.save(is_last=True):
                return await self._actors.first(remote(Actor.weights_hash))

        return await self.recovery.over("weights_hash", weights_hash)
