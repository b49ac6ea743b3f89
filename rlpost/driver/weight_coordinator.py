"""Weight coordinator: moves weights from the trainer to the engines over the configured transport.

Input: settings, the actors, the engines. Output: all engines on one version. One update runs at a
time. After a restart of an engine the process groups are created again, because a process group
cannot admit a new member.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rlpost.config.tree import Config
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.placement import Placement, Ports
from rlpost.driver.preemption import StopRequest
from rlpost.driver.worker_groups import Actor, ActorGroup, remote
from rlpost.durable.daemon_threads import in_daemon
from rlpost.engines.engine_side_weights import (
    AdapterMover,
    BroadcastMover,
    DiskMover,
    Mover,
    NoMover,
    PauseMode,
    Receiver,
    SharingMover,
    WeightUpdate,
    connection_name,
    num_bytes,
    num_engine_ranks,
    stage_group,
)
from rlpost.errors import ConfigError, RlpostError, SyncError, TrainerDied, WorkerFailed
from rlpost.observe.spans import span

logger = logging.getLogger(__name__)

REMOVAL_S = 8.0  # deadline to remove the folder of the weights; a preempted run has EXIT_S in all


class VersionMover:
    """Sends the weights of the version that is asked for, or fails.

    They are the trainer's own, or those of an earlier update, which its ranks keep with
    --update-weights-interval: engines get these when they are restarted or the run is resumed.
    """

    def __init__(self, mover: Mover, actors: ActorGroup) -> None:
        """``mover`` sends the model's current weights."""
        self._mover, self._actors = mover, actors
        self.in_session = mover.in_session

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """See ``Mover``. Raises SyncError when the ranks do not have that version."""
        await self._actors.all(remote(Actor.old_policy.swap_in, version))
        try:
            await self._mover.move(receivers, version)
        finally:
            await self._actors.all(remote(Actor.old_policy.swap_out))


class WeightCoordinator:
    """Sends weights from ``actors`` to ``engines``. Call ``connect`` first."""

    def __init__(
        self,
        config: Config,
        engines: OwnEngines,
        actors: ActorGroup,
        *,
        placement: Placement,
        ports: Ports,
        folder: Path,
        stop: StopRequest,
        incarnation: int = 0,
    ) -> None:
        """
        Args:
            folder: shared by all nodes; --update-weight-transport disk writes the weights there.
            stop: checked before each bucket or folder is sent, while no rank is in a collective.
        """
        self._config = config
        self._engines = engines
        self._actors = actors
        self._placement = placement
        self._ports = ports
        self._attempt = folder.parent
        disk = config.sync.update_weight_disk_dir
        self._folder = folder if disk is None else Path(disk) / self._own_name()
        self._stop = stop
        self._incarnation = incarnation
        self._num_connections = 0
        self._group_name = ""
        self._backend = ""
        self._is_abandoned = False
        self.num_bytes = 0
        """Bytes of all weights as they are sent."""

    async def connect(self) -> None:
        """Plan the buckets and connect to the engines that get weights.

        Call it again after a restart of an engine, and when engines are lent or given back.

        Raises SyncError with the name of an engine that did not connect.
        """
        self._is_abandoned = False
        timeout_s = 60.0 * self._config.cluster.distributed_timeout_minutes
        await self._leave()
        self._update = WeightUpdate(
            self._engines.receivers, api_key=self._engines.api_key, timeout_s=timeout_s
        )
        buckets = await self._actors.first(remote(Actor.bucket_plan))
        self.num_bytes = sum(map(num_bytes, buckets))
        self._mover: Mover
        if not self._engines.addresses:
            self._mover = NoMover()  # all engines are on other jobs, which read files
        elif self._config.sync.update_weight_transport == "disk":
            if any(dtype.startswith("float8") for bucket in buckets for dtype in bucket.dtypes):
                raise ConfigError(
                    "--update-weight-transport disk: --hf-checkpoint is in FP8, but the files have the trainer's "
                    "precision; use 'memory'"
                )
            sends_adapters = self._config.sync.update_weight_mode == "adapter"
            self._mover = (AdapterMover if sends_adapters else DiskMover)(self._write)
        elif self._config.cluster.colocate:
            self._mover = SharingMover(
                buckets, self._share, ranks_of=self._placement.ranks_of_engines
            )
        else:
            self._num_connections += 1
            self._group_name = connection_name(self._incarnation, self._num_connections)
            mover = BroadcastMover(buckets, self._send, group_name=self._group_name)
            await self._form_groups(mover)
            self._mover = mover

    def move(self, placement: Placement) -> None:
        """Use ``placement`` from the next ``connect`` on: ranks or engines are on other nodes."""
        self._placement = placement

    async def update(
        self,
        version: int,
        *,
        pause: PauseMode = "abort",
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Bring all engines that get weights to ``version``; see ``WeightUpdate.update``.

        Leaves no files behind.
        """
        try:
            with span("update weights"):
                mover = VersionMover(self._mover, self._actors)
                await self._update.update(version, mover, pause=pause, ready=ready)
        finally:
            await in_daemon(self._remove_files)

    async def _leave(self) -> None:
        if self._group_name:
            await self._actors.all(remote(Actor.broadcast.disconnect))
            await self._update.leave_groups(self._group_name, len(self._ports.sync_groups))

    async def _form_groups(self, mover: BroadcastMover) -> None:
        """Create one process group per pipeline stage: its source rank and all engine ranks.

        The source waits for all of them until its deadline, so no engine may be dead.
        """
        await self._update.check_health()
        stages = await self._actors.all(remote(Actor.sync_stage))
        sources = {stage: rank for rank, stage in enumerate(stages) if stage is not None}
        hosts = [self._placement.actors[sources[stage]].ip for stage in sorted(sources)]
        addresses = list(zip(hosts, self._ports.sync_groups, strict=True))
        ranks = num_engine_ranks(self._update.receivers)
        own: list[tuple[str, int, int, str]] = [
            ("", 0, ranks, "")
            if stage is None
            else (*addresses[stage], ranks, stage_group(self._group_name, stage))
            for stage in stages
        ]
        self._backend = await self._actors.first(remote(Actor.broadcast_backend))
        await asyncio.gather(
            self._actors.each([remote(Actor.broadcast.connect, *place) for place in own]),
            mover.connect(self._update.receivers, addresses, backend=self._backend),
        )

    @property
    def engines_are_stuck(self) -> bool:
        """Whether engines are blocked in an abandoned broadcast.

        With NCCL the kernel spins until torch's watchdog ends the process, even if the server still
        answers. With gloo the broken connection ends the broadcast.
        """
        return self._is_abandoned and self._backend == "nccl"

    async def _send(self, index: int) -> None:
        self._stop.check()
        try:
            await self._actors.all(remote(Actor.send_bucket, index))
        except asyncio.CancelledError:
            # An engine failed; the trainer would block in the broadcast until its deadline.
            self._is_abandoned = True
            await self._release_trainer()
            raise
        except (SyncError, TrainerDied, WorkerFailed):
            self._is_abandoned = True
            raise

    async def _release_trainer(self) -> None:
        """Abort the broadcast that the trainer is blocked in."""
        try:
            await self._actors.aside(remote(Actor.broadcast.abort))
        except RlpostError as error:
            logger.warning("the broadcast of the trainer could not be aborted: %s", error)

    async def _share(self, index: int) -> list[str]:
        self._stop.check()
        return await self._actors.all(remote(Actor.share_bucket, index))

    async def _write(self, version: int) -> str:
        """Write the weights, or the adapters alone, of this version to a folder; return it."""
        self._stop.check()
        folder = str(self._version_folder(version))
        adapter_bytes = await self._actors.write_engine_folder(folder, version)
        if adapter_bytes is not None:
            self.num_bytes = adapter_bytes
        return folder

    def _own_name(self) -> str:
        """Return a folder name unique to this run, because the content of the folder is deleted."""
        run = self._attempt.parents[1]  # RUN/attempts/N
        return f"{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"

    def _version_folder(self, version: int) -> Path:
        return self._folder / f"version-{version:07d}"

    async def close(self) -> None:
        """Remove the run's folder in --update-weight-disk-dir."""
        if self._config.sync.update_weight_disk_dir is not None:
            with contextlib.suppress(OSError):  # missing, not empty, or late: a TimeoutError is one
                async with asyncio.timeout(REMOVAL_S):
                    await in_daemon(self._folder.rmdir)

    def _remove_files(self) -> None:
        for folder in (*self._folder.glob("version-*"), *self._folder.glob(".version-*")):
            shutil.rmtree(folder, ignore_errors=True)
