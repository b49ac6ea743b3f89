"""The stages of the loop on a real cluster: actors and engines in Ray workers, a router beside the driver.

In: settings, the cluster that the agents brought up, the run's folder. Out: what ``loop.Stages`` promises. Everything
that takes long at the start (imports of every rank, engine start) runs at the same time under one deadline.
"""

from __future__ import annotations

import asyncio
import json
import logging
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
from rlpost.errors import CheckpointError, RlpostError
from rlpost.orchestration.actor_settings import actor_settings
from rlpost.orchestration.batches import model_break_even
from rlpost.orchestration.checkpoints import Checkpoints
from rlpost.orchestration.engines import Fleet
from rlpost.orchestration.generation import Generation
from rlpost.orchestration.loop import Rollouts
from rlpost.orchestration.placement import Placement, Ports, place, service_ports
from rlpost.orchestration.preemption import StopRequest
from rlpost.orchestration.training import Training
from rlpost.orchestration.turns import Turns
from rlpost.orchestration.watch import Watch
from rlpost.orchestration.weight_sync import WeightSync
from rlpost.orchestration.workers import WorkerGroup, connect
from rlpost.types import SampleGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClusterStages:
    """Generate, train, sync, evaluate and save on a cluster. ``start`` first, ``close`` last."""

    def __init__(self, config: Config, cluster: Cluster, *, checkpoints: Checkpoints, stop: StopRequest) -> None:
        self._config = config
        self._cluster = cluster
        self._checkpoints = checkpoints
        self._stop = stop
        folder = config.checkpoint.hf_checkpoint
        self._break_even = model_break_even(json.loads((Path(folder) / "config.json").read_text()))
        self._generation = Generation(config, stop)

    async def start(self, checkpoint: Path | None) -> None:
        """Bring up actors, engines and router; load ``checkpoint``, or the Hugging Face weights without one."""
        started = time.monotonic()
        config, cluster = self._config, self._cluster
        placement, ports = self._layout()
        logger.info("starting %d actor ranks and %d engines", len(placement.actors), len(placement.engines))
        self._fleet = Fleet(config, cluster, placement, ports)
        self._actors = self._actor_workers(placement)
        starting = [self._start_actors(placement, ports, checkpoint), self._start_engines(len(placement.actors))]
        if config.cluster.colocate:  # engines measure what memory is left: one after the other
            for part in starting:
                await self._within_deadline(part)
        else:
            await self._within_deadline(*starting)
        folder = Path(cluster.attempt_dir) / "weights"
        weights = WeightSync(config, self._fleet, self._actors, placement=placement, ports=ports, folder=folder)
        self._watch = Watch(config, self._fleet, weights)
        await self._within_deadline(weights.connect())
        logger.info("actors and engines ready after %.1f s", time.monotonic() - started)

    def _layout(self) -> tuple[Placement, Ports]:
        """Join Ray; who runs where, and on which ports."""
        config, cluster = self._config, self._cluster
        placement = place(connect(cluster), config)
        num_engines, num_stages = len(placement.engines), config.perf.pipeline_model_parallel_size
        return placement, service_ports(
            cluster.port_base, cluster.port_count, num_engines=num_engines, num_stages=num_stages
        )

    async def _within_deadline(self, *starting: Awaitable[Any]) -> None:
        deadline_s = self._config.cluster.bringup_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._unless_stopped(asyncio.gather(*starting))
        except TimeoutError:
            logs = self._cluster.attempt_dir
            raise RlpostError(
                f"actors and engines were not ready after {deadline_s} s (--bringup-deadline-s); "
                f"the last lines of {logs}/actor-*.log and {logs}/engine-*.log say who hangs"
            ) from None

    def _actor_workers(self, placement: Placement) -> WorkerGroup:
        settings, ranks = actor_settings(self._config), range(len(placement.actors))
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # the order of overlapped TP collectives relies on it
        return WorkerGroup(
            [partial(_make_actor, settings)] * len(ranks),
            placement.actors,
            names=[f"actor-{rank}" for rank in ranks],
            log_dir=Path(self._cluster.attempt_dir),
            envs=[env] * len(ranks),
        )

    async def _start_actors(self, placement: Placement, ports: Ports, checkpoint: Path | None) -> None:
        world, head = len(placement.actors), placement.actors[0].ip
        await self._actors.call_each("setup", [(rank, world, head, ports.actor_group) for rank in range(world)])
        data_ranks: list[int] = await self._actors.call("data_parallel_rank")
        is_fresh = checkpoint is None and self._config.checkpoint.ref_load is None
        self._training = Training(
            self._config, self._actors, data_ranks, is_fresh=is_fresh, break_even=self._break_even
        )
        if checkpoint is None:
            await self._actors.call("import_weights")
        else:
            await self._actors.call("load", str(checkpoint))

    async def _start_engines(self, num_ranks: int) -> None:
        config = self._config
        gpus = await self._actors.call("visible_gpu") if config.cluster.colocate else [""] * num_ranks
        self._turns = Turns(config, self._actors, self._fleet)
        if config.cluster.colocate:
            await self._turns.generate()
        await self._fleet.start(gpus)
        await self._generation.connect(self._fleet.router)

    def rollouts(self, state: RunState) -> Rollouts:
        """The source of batches that goes on from ``state``; engines are looked after while it is waited for."""
        return self._generation.rollouts(state, self._watch.over)

    async def train(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """The optimizer steps of a rollout."""
        await self._turns.train()
        return await self._training.train(groups)

    async def sync(self, policy_version: int) -> None:
        """Bring the weights to every engine; the version is checked on each."""
        await self._turns.send()
        await self._watch.update(policy_version, pause="abort", ready=self._turns.generate)

    async def evaluate(self) -> Mapping[str, float]:
        """Means on every held-out set, as ``eval/SET/name``."""
        async with self._watch.over():
            return await self._generation.evaluate()

    async def save(self, state: RunState, *, wait: bool) -> None:
        """Commit the actors' tensors and ``state``; with --async-save in the background, unless told to ``wait``.

        A save that nobody waits for and that fails is logged: the next one tries again, and training goes on.
        """
        in_background = self._config.checkpoint.async_save and not wait

        async def write(folder: Path) -> None:
            await self._actors.call_each(
                "save", [(str(folder), state.step)] * len(self._actors), in_background=in_background
            )

        async with self._at_rest():
            try:
                if in_background:
                    await self._checkpoints.start(state, write, lambda: self._actors.call_aside("finish_save"))
                else:
                    await self._checkpoints.commit(state, write)
            except (CheckpointError, OSError) as error:
                if wait:
                    raise
                logger.error("checkpoint of step %d is not saved, the one before stays: %s", state.step, error)

    async def settle_saves(self) -> bool:
        """Wait for what the last ``save`` left to the background; False when it failed."""
        return await self._checkpoints.settle()

    def _at_rest(self) -> AbstractAsyncContextManager[None]:
        """The trainer's weights and optimizer are on its devices within."""
        return self._turns.save()

    def text(self, token_ids: Sequence[int]) -> str:
        """What tokens of a prompt say, without special ones."""
        return self._generation.tokenizer.decode(token_ids)

    async def weights_hash(self) -> str:
        """A hash of the trainer's weights under their Hugging Face names."""
        async with self._at_rest():
            return (await self._actors.call("weights_hash"))[0]

    async def close(self) -> None:
        """End graders and router; Ray's workers, and the engines under them, end with the driver."""
        await self._generation.close()
        if hasattr(self, "_fleet"):
            self._fleet.close()

    async def _unless_stopped(self, work: asyncio.Future[Any]) -> None:
        """Wait for ``work``; a stop request ends the wait: nothing is trained yet that could be lost."""
        try:
            while not work.done():
                self._stop.check()
                await asyncio.wait([work], timeout=0.5)
            work.result()
        finally:
            work.cancel()


def _make_actor(settings: ActorSettings) -> Any:
    from rlpost.actor.actor import Actor  # in the worker: torch and Megatron are not for the driver

    return Actor(settings)
