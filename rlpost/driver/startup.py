"""Startup of a run's workers: placement, actor ranks, and the deadline by which all must be ready.

Input: settings, the cluster that the agents started. Output: the placement, groups of workers that
are set up, or an error that names the logs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.cluster import Cluster, Node
from rlpost.config.tree import Config
from rlpost.driver.calls import Calls, EndWhenHanging
from rlpost.driver.hang_report import HangReport
from rlpost.driver.ledger_lines import RecordEvent, not_recorded
from rlpost.driver.placement import Placement, Ports, Slot, order_by_gpu, place, ports_of_run
from rlpost.driver.preemption import StopRequest
from rlpost.driver.role_environment import trainer_environment
from rlpost.driver.training import Training
from rlpost.driver.worker_groups import Actor, ActorGroup, remote
from rlpost.driver.workers import StandbyWorker, WorkerGroup, connect
from rlpost.durable.daemon_threads import start_in_daemon
from rlpost.errors import RlpostError, TrainerDied, WorkerDied
from rlpost.observe.progress.overdue import OverdueRule

T = TypeVar("T")

NICENESS = 15  # of the imports of standby processes


class Startup:
    """Places workers on the cluster and starts the trainer's."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        *,
        stop: StopRequest,
        break_even: float,
        record: RecordEvent = not_recorded,
    ) -> None:
        """``break_even``: see ``model_flops.model_break_even``."""
        self._config = config
        self._cluster = cluster
        self._stop = stop
        self._break_even = break_even
        self._hosts = {node.ip: node.host for node in cluster.nodes}
        self._run_folder = Path(cluster.attempt_dir).parents[1]
        self._record = record

    def add_node(self, node: Node) -> None:
        """Record a node that replaces another: errors name its ranks by its host."""
        self._hosts[node.ip] = node.host

    def layout(self) -> tuple[Placement, Ports]:
        """Connect to Ray; return the placement of workers and their ports."""
        config, cluster = self._config, self._cluster
        placement = place(connect(cluster), config)
        return placement, ports_of_run(
            config, placement, base=cluster.port_base, count=cluster.port_count
        )

    async def within_deadline(self, *starting: Awaitable[object]) -> None:
        """Await all of them.

        Raises Preempted on a stop request, RlpostError after --bringup-deadline-s.
        """
        deadline_s = self._config.cluster.bringup_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                # Cancelling loses no state, because training has not begun.
                await self._stop.unless_requested(asyncio.gather(*starting))
        except TimeoutError:
            logs = self._cluster.attempt_dir
            raise RlpostError(
                f"actors and engines were not ready after {deadline_s} s (--bringup-deadline-s); "
                "compiled kernels are kept where SGLANG_CACHE_DIR is on the node's disk; the last "
                f"lines of {logs}/actor-*.log and {logs}/engine-*.log show which process hangs"
            ) from None

    async def workers(
        self, placement: Placement, standbys: Mapping[int, StandbyWorker] | None = None
    ) -> ActorGroup:
        """Create the worker of each rank that trains; it imports Megatron while others start.

        ``standbys`` are used for their ranks instead of new workers.
        """
        make = partial(make_actor, self._config, self._run_folder)
        workers = self._ranks("actor", make, placement.actors, died=TrainerDied, standbys=standbys)
        return ActorGroup(workers)

    def standby_workers(self, placement: Placement, gpus: Sequence[str]) -> WorkerGroup:
        """Create a process for each rank that imports Megatron at low priority, and waits.

        ``gpus``: CUDA_VISIBLE_DEVICES of each rank, which its standby shares.
        """
        make = partial(make_actor, self._config, self._run_folder)
        slots = [replace(slot, num_gpus=0, shared_with=()) for slot in placement.actors]
        return self._ranks("standby", partial(at_low_priority, make), slots, gpus=gpus)

    def _ranks(
        self,
        role: str,
        make: Callable[[], object],
        slots: Sequence[Slot],
        *,
        gpus: Sequence[str] | None = None,
        died: Callable[[str, Sequence[int]], WorkerDied] = WorkerDied,
        standbys: Mapping[int, StandbyWorker] | None = None,
    ) -> WorkerGroup:
        """Create a worker for each rank; ``gpus``: CUDA_VISIBLE_DEVICES of each."""
        return WorkerGroup(
            [make] * len(slots),
            slots,
            names=[f"{role}-{rank}" for rank in range(len(slots))],
            log_dir=Path(self._cluster.attempt_dir),
            envs=[self._rank_environment(gpu) for gpu in gpus or [""] * len(slots)],
            died=died,
            standbys=standbys,
        )

    def _rank_environment(self, gpu: str = "") -> dict[str, str]:
        """Return the environment of a rank; ``gpu`` is its CUDA_VISIBLE_DEVICES, if not Ray's."""
        own = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        return trainer_environment(self._config, os.environ) | own

    def _calls(self, ranks: ActorGroup) -> Calls:
        cluster, stop = self._config.cluster, self._stop
        if cluster.hang_factor is None:
            return Calls(ranks, stop)
        rule = OverdueRule(cluster.hang_factor, cluster.hang_min_s)
        report = HangReport(Path(self._cluster.attempt_dir), hosts=self._hosts)
        return Calls(ranks, stop, EndWhenHanging(ranks, rule, report, is_stopping=stop.requested))

    async def trainer(
        self,
        actors: ActorGroup,
        placement: Placement,
        ports: Ports,
        checkpoint: Path | None,
        *,
        is_compared: bool,
    ) -> Training:
        """Set up all ranks and load ``checkpoint`` or, without one, the Hugging Face weights.

        ``is_compared``: see ``Actor.load``.
        """
        data_ranks = await _set_up(actors, placement.actors, ports.actor_group)
        if checkpoint is None:
            await actors.all(remote(Actor.import_weights))
        else:
            await actors.all(remote(Actor.load, str(checkpoint), is_compared=is_compared))
        is_fresh = checkpoint is None and self._config.checkpoint.ref_load is None
        return Training(
            self._config,
            actors,
            data_ranks,
            calls=self._calls(actors),
            is_fresh=is_fresh,
            break_even=self._break_even,
            hosts=[self._hosts.get(slot.ip, slot.ip) for slot in placement.actors],
            record=self._record,
        )


async def _set_up(ranks: ActorGroup, slots: Sequence[Slot], port: int) -> list[int]:
    """Form the process groups of these ranks; return the data-parallel rank of each.

    Ray allocates the first free GPUs of a node (resource_instance_set.cc, TryAllocate) to
    whichever worker's request arrives next, and does not promise the order of requests.
    """
    positions = await ranks.all(remote(Actor.gpu_position))
    await ranks.workers.reorder(order_by_gpu(slots, positions))
    world, address = len(ranks), slots[0].ip
    await ranks.each([remote(Actor.setup, rank, world, address, port) for rank in range(world)])
    return await ranks.all(remote(Actor.data_parallel_rank))


def make_actor(config: Config, run_folder: Path | None = None) -> Actor:
    """Return a rank of the policy, in the process of a worker; ``run_folder`` has the images."""
    # Imported in the worker: the driver does not load Megatron. Megatron imports wandb and TensorBoard
    # for its own logging, which take a fifth of the processor time of a rank's imports.
    with _hidden("wandb"), _hidden("tensorboard"):
        from rlpost.trainer.actor import Actor

    return Actor(config, run_folder=run_folder)


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Make imports of a package fail in this block, unless it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # the import system raises ImportError
    try:
        yield
    finally:
        del sys.modules[package]


def at_low_priority(act: Callable[[], T]) -> T:
    """Return the result of ``act``, run in a thread of low CPU priority. Blocks.

    The process keeps its priority for later work: an unprivileged process could not raise it again.
    """

    def run() -> T:
        # On Linux a priority belongs to a thread, and PRIO_PROCESS accepts a thread's id.
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(own, NICENESS))
        return act()

    return start_in_daemon(run).result()
