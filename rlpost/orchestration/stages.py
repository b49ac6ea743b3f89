"""The stages of the loop on a cluster: actors and engines in Ray workers, a router beside the driver.

Input: settings, the cluster that the agents started, the run's folder. Output: an implementation of ``loop.Stages``.
The slow parts of the startup (imports of every rank, engine start) run concurrently under one deadline.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bootstrap.handoff import Cluster
from rlpost.actor.settings import ActorSettings
from rlpost.checkpoint.state import RunState
from rlpost.config.tree import Config
from rlpost.errors import CheckpointError, Fenced, RlpostError
from rlpost.orchestration.batches import model_break_even
from rlpost.orchestration.checkpoints import Checkpoints, written
from rlpost.orchestration.engine_health import EngineHealth
from rlpost.orchestration.engines import Fleet
from rlpost.orchestration.generation import Generation
from rlpost.orchestration.hf_export import HuggingFaceExport
from rlpost.orchestration.loop import Rollouts
from rlpost.orchestration.observation import Observation
from rlpost.orchestration.offload import Offload
from rlpost.orchestration.placement import Placement, Ports, order_by_gpu, place, service_ports
from rlpost.orchestration.preemption import StopRequest
from rlpost.orchestration.settings_of_actors import actor_settings
from rlpost.orchestration.training import Training
from rlpost.orchestration.weight_coordinator import WeightCoordinator, nccl_environment
from rlpost.orchestration.worker_groups import ActorGroup
from rlpost.orchestration.workers import WorkerGroup, connect
from rlpost.rollout.engine_side_weights import PauseMode
from rlpost.rollout.journal import Journal
from rlpost.types import SampleGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClusterStages:
    """Generates, trains, syncs, evaluates and saves on a cluster. Call ``start`` first, ``close`` last."""

    def __init__(self, config: Config, cluster: Cluster, *, checkpoints: Checkpoints, stop: StopRequest) -> None:
        self._config = config
        self._cluster = cluster
        self._checkpoints = checkpoints
        self._stop = stop
        folder = config.checkpoint.hf_checkpoint
        hf = json.loads((Path(folder) / "config.json").read_text())
        self._break_even = model_break_even(hf)
        run = Path(cluster.attempt_dir).parents[1]
        self._hf_export = HuggingFaceExport(config.checkpoint, run, check=checkpoints.check_owner)
        self._observation = Observation(config, hf, checkpoints=checkpoints, traces=run / "traces")
        self._generation = Generation(config, stop, check=checkpoints.check_owner)

    def read_prompts(self) -> None:
        """Read through the prompt files, in any thread. Raises DataError."""
        self._generation.read_prompts()

    async def start(self, checkpoint: Path | None) -> None:
        """Start actors, engines and router; load ``checkpoint`` or, without one, the Hugging Face weights."""
        started = time.monotonic()
        config, cluster = self._config, self._cluster
        placement, ports = self._layout()
        logger.info("starting %d actor ranks and %d engines", len(placement.actors), len(placement.engines))
        self._fleet = Fleet(config, cluster, placement, ports)
        self._actors = self._actor_workers(placement)
        num_ranks = len(placement.actors)
        if config.cluster.colocate:  # engines measure free memory, so the actors start first
            await self._within_deadline(self._start_actors(placement, ports, checkpoint))
            await self._within_deadline(self._start_engines(num_ranks))
        else:
            await self._within_deadline(
                self._start_actors(placement, ports, checkpoint), self._start_engines(num_ranks)
            )
        folder = Path(cluster.attempt_dir) / "weights"
        weights = self._weights = WeightCoordinator(
            config,
            self._fleet,
            self._actors,
            placement=placement,
            ports=ports,
            folder=folder,
            stop=self._stop,
        )
        self._engine_health = EngineHealth(config, self._fleet, weights, stop=self._stop)
        await self._within_deadline(weights.connect())
        await self._observation.attach(self._actors, self._fleet, weights)
        logger.info("actors and engines ready after %.1f s", time.monotonic() - started)

    def _layout(self) -> tuple[Placement, Ports]:
        """Connect to Ray; return the placement of workers and their ports."""
        config, cluster = self._config, self._cluster
        placement = place(connect(cluster), config)
        num_stages = config.perf.pipeline_model_parallel_size
        kept = 1 if config.observe.use_prometheus else 0  # the last port of the block serves Prometheus
        return placement, service_ports(
            cluster.port_base,
            cluster.port_count - kept,
            engines=placement.engines,
            num_stages=num_stages,
            over_tcp=config.sglang.shares_attention,
        )

    async def _within_deadline(self, *starting: Awaitable[Any]) -> None:
        deadline_s = self._config.cluster.bringup_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._stop.unless_requested(asyncio.gather(*starting))  # no state is lost: training has not begun
        except TimeoutError:
            logs = self._cluster.attempt_dir
            raise RlpostError(
                f"actors and engines were not ready after {deadline_s} s (--bringup-deadline-s); "
                f"the last lines of {logs}/actor-*.log and {logs}/engine-*.log show which process hangs"
            ) from None

    def _actor_workers(self, placement: Placement) -> ActorGroup:
        settings, ranks = actor_settings(self._config), range(len(placement.actors))
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # overlapped TP collectives rely on one queue
        env |= nccl_environment(self._config, os.environ)
        workers = WorkerGroup(
            [partial(_make_actor, settings)] * len(ranks),
            placement.actors,
            names=[f"actor-{rank}" for rank in ranks],
            log_dir=Path(self._cluster.attempt_dir),
            envs=[env] * len(ranks),
        )
        return ActorGroup(workers)

    async def _start_actors(self, placement: Placement, ports: Ports, checkpoint: Path | None) -> None:
        # Ray allocates the first free GPUs of a node (resource_instance_set.cc, TryAllocate) to whichever worker's
        # request arrives next, and does not promise the order of requests.
        positions = await self._actors.gpu_positions()
        await self._actors.reorder(order_by_gpu(placement.actors, positions))
        await self._actors.setup(placement.actors[0].ip, ports.actor_group)
        data_ranks = await self._actors.data_parallel_ranks()
        is_fresh = checkpoint is None and self._config.checkpoint.ref_load is None
        self._training = Training(
            self._config, self._actors, data_ranks, stop=self._stop, is_fresh=is_fresh, break_even=self._break_even
        )
        if checkpoint is None:
            await self._actors.import_weights()
        else:
            await self._actors.load(checkpoint)

    async def _start_engines(self, num_ranks: int) -> None:
        config = self._config
        gpus = await self._actors.visible_gpus() if config.cluster.colocate else [""] * num_ranks
        self._offload = Offload(config, self._actors, self._fleet)
        if config.cluster.colocate:
            await self._offload.generate()
        await self._fleet.start(gpus)
        await self._generation.connect(self._fleet.router)

    def rollouts(self, state: RunState, journal: Journal) -> Rollouts:
        """Return the source of batches, resumed from ``state``. Engines are health-checked while it generates."""
        self._observation.step = state.step
        return self._generation.rollouts(state, journal, self._engine_health.over)

    async def train(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """Run the optimizer steps of a rollout."""
        self._stop.check()
        await self._offload.train()
        metrics = await self._observation.around(groups, self._training.train(groups))
        self._engine_health.trained()
        return metrics

    async def sync(self, policy_version: int) -> None:
        """Send the weights to every engine and check the version on each."""
        self._stop.check()
        is_writing = self._config.rollout.rollout_mode == "fully_async"
        pause: PauseMode = self._fleet.pause_mode if is_writing else "abort"
        await self._engine_health.update(
            policy_version, pause=pause, before=self._offload.send, ready=self._offload.generate
        )

    async def evaluate(self) -> Mapping[str, float]:
        """Return means on every held-out set, as ``eval/SET/name``."""
        async with self._engine_health.over():
            return await self._generation.evaluate()

    async def save(self, state: RunState, *, wait: bool) -> None:
        """Commit the actors' tensors and ``state``; with --async-save in the background, except with ``wait``.

        Without ``wait``, a save that fails or is deferred is logged and retried later, and training continues. With
        ``wait`` it is the last save: nothing is generated afterwards, and a failure is raised. Raises Fenced when
        another attempt owns the folder.
        """
        in_background = self._config.checkpoint.async_save and not wait

        async def write(folder: Path) -> None:
            self._stop.saves.begin()
            await self._actors.save(folder, state.step, in_background=in_background)

        async with self._at_rest(is_last=wait):
            try:
                if in_background:
                    begun = await self._checkpoints.start(state, write, partial(written, self._actors.save_is_done))
                else:
                    begun = await self._checkpoints.commit(state, write)
            except (CheckpointError, OSError) as error:
                if wait or isinstance(error, Fenced):
                    raise
                logger.error("saving step %d failed, the previous checkpoint is kept: %s", state.step, error)
                return
            if begun and not self._stop.requested():
                await self._hf_export.export(state.step, self._actors.export)

    def save_is_owed(self) -> bool:
        """Whether a save failed or was deferred."""
        return self._checkpoints.is_owed

    async def measured(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return metrics of throughput, weight sync, checkpoints and memory."""
        return await self._observation.measured(step, metrics)

    async def settle_saves(self) -> bool:
        """Wait for a save in the background; False when it failed."""
        return await self._checkpoints.settle()

    def _at_rest(self, *, is_last: bool) -> AbstractAsyncContextManager[None]:
        """Keep the trainer's weights and optimizer on its devices inside the block."""
        return self._offload.save(is_last=is_last)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens of a prompt, without special tokens."""
        return self._generation.tokenizer.decode(token_ids)

    async def weights_hash(self) -> str:
        """Return a hash of the trainer's weights under their Hugging Face names."""
        async with self._at_rest(is_last=True):
            return await self._actors.weights_hash()

    async def close(self) -> None:
        """Stop graders and router; Ray's workers and their engines end with the driver."""
        await self._observation.close(is_leaving=self._stop.requested())
        await self._generation.close()
        if hasattr(self, "_weights"):
            await self._weights.close()
        if hasattr(self, "_fleet"):
            self._fleet.close()


def _make_actor(settings: ActorSettings) -> Any:
    from rlpost.actor.actor import Actor  # imported in the worker: the driver loads neither torch nor Megatron

    return Actor(settings)
