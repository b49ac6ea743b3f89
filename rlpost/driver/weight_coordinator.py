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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from common.bounded import together
from rlpost.config.engine_args import sends_draft_weights
from rlpost.config.plan.shard_plan import Unit
from rlpost.config.plan.shard_roles import RankPlan
from rlpost.config.plan.weight_update import obstacle_to_slices
from rlpost.config.tree import Config
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.placement import Placement, Ports
from rlpost.driver.preemption import StopRequest
from rlpost.driver.worker_groups import Actor, ActorGroup, RemoteCall, remote
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
from rlpost.engines.load_check import CheckedMover, LoadCheck
from rlpost.engines.shard_mover import SLICES, Colocation, Description, Meeting, ShardMover
from rlpost.errors import (
    ConfigError,
    PlanOutdated,
    RlpostError,
    SlicesRefused,
    SyncError,
    TrainerDied,
    WorkerFailed,
)
from rlpost.observe.spans import span

logger = logging.getLogger(__name__)

JOIN_S = 300.0
"""Deadline for trainer and engines to form a group: more than thousands of NCCL ranks take."""
REMOVAL_S = 8.0  # deadline to remove the folder of the weights; a preempted run has EXIT_S in all


class _ShardRanks:
    """The trainer's ranks for a ``ShardMover``."""

    def __init__(
        self,
        actors: ActorGroup,
        *,
        joining: Callable[[Awaitable[object]], Awaitable[None]],
        with_engines: Callable[[Awaitable[object]], Awaitable[None]],
        stop: StopRequest,
    ) -> None:
        """``with_engines`` awaits a collective of ranks and engines, ``joining`` what precedes it."""
        self._actors, self._joining, self._with_engines = actors, joining, with_engines
        self._stop = stop

    async def describe(self) -> Sequence[Description]:
        return await self._actors.all(remote(Actor.shards.describe))

    async def use(self, plans: Sequence[RankPlan]) -> None:
        await self._actors.each([remote(Actor.shards.use, plan) for plan in plans])

    async def connect(self, num_engine_ranks: int, meeting: Meeting) -> None:
        place = (meeting.host, meeting.port, num_engine_ranks, meeting.name, meeting.join_s)
        await self._joining(self._actors.all(remote(Actor.shards.connect, *place)))
        await self._with_engines(self._actors.all(remote(Actor.shards.meet, meeting.join_s)))

    async def pack(self, index: int) -> None:
        await self._actors.all(remote(Actor.pack_shards, index))

    async def send(self, index: int) -> None:
        self._stop.check()
        await self._with_engines(self._actors.all(remote(Actor.shards.send, index)))

    async def share(self, index: int, message: Mapping[str, object]) -> Sequence[str]:
        self._stop.check()
        return await self._actors.all(remote(Actor.share_shards, index, message))


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
        self._has_shards = False
        self._has_sent_slices = False
        self._refusal: str | None = None
        """Why the engines refused slices, in this driver's life."""
        self._load_check = LoadCheck()
        """Of engines that get all weights."""
        self._units: Sequence[Unit] | None = None
        """All weights, since the first connection that sends them."""
        self._timeout_s = 60.0 * config.cluster.distributed_timeout_minutes
        self._join_s = min(JOIN_S, self._timeout_s)
        self.num_bytes = 0
        """Bytes of all weights as they are sent."""

    async def connect(self) -> None:
        """Plan the buckets and connect to the engines that get weights.

        Call it again after a restart of an engine, and when engines are lent or given back.

        Raises SyncError with the name of an engine that did not connect.
        """
        self._is_abandoned = False
        await self._leave()
        self._update = WeightUpdate(
            self._engines.receivers,
            api_key=self._engines.api_key,
            timeout_s=self._timeout_s,
            selector="all" if sends_draft_weights(self._config) else "target",
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
        elif await self._sends_slices():
            await self._update.check_health()
            largest = max(map(num_bytes, buckets))
            self._mover = await self._shard_mover(max_bytes=largest)
        elif self._config.cluster.colocate:
            self._mover = SharingMover(
                buckets, self._share, ranks_of=self._placement.ranks_of_engines
            )
        else:
            self._group_name = self._next_connection()
            mover = BroadcastMover(buckets, self._send, group_name=self._group_name)
            await self._form_groups(mover)
            self._mover = mover
        self._sender = await self._checked()

    async def _checked(self) -> Mover:
        """The mover, with a check of the engines before it sends; one of slices has its own."""
        if self._config.sends_adapters or isinstance(self._mover, ShardMover):
            return self._mover
        if self._units is None:
            self._units = await self._actors.first(remote(Actor.shards.list_units))
        return CheckedMover(self._mover, self._load_check, self._units, self._attempt / SLICES)

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

        Slices are sent again, by a new plan, if an engine has changed since it recorded; engines
        that cannot receive them get all weights. Leaves no files behind.

        Raises SyncError. If ``engines_are_stuck`` is true then, restart the engines: the next
        connection sends by a new plan, or all weights.
        """
        try:
            with span("update weights"):
                try:
                    await self._send_all(version, pause, ready)
                except SlicesRefused as error:
                    await self._prepare_again(error)
                    try:
                        await self.connect()
                        await self._send_all(version, pause, ready)
                    except BaseException:
                        self._refusal = None  # gathered weights do not arrive either
                        raise
        finally:
            await in_daemon(self._remove_files)

    async def _send_all(
        self, version: int, pause: PauseMode, ready: Callable[[], Awaitable[None]] | None
    ) -> None:
        mover = VersionMover(self._sender, self._actors)
        await self._update.update(version, mover, pause=pause, ready=ready)
        self._has_sent_slices |= isinstance(self._mover, ShardMover)

    async def _prepare_again(self, error: SlicesRefused) -> None:
        """Prepare for another connection: slices by a new plan, or all weights.

        Raises the error if it is no refusal, as engines have died or have taken slices before; or
        if the engines have to be restarted first.
        """
        if isinstance(error, PlanOutdated):
            logger.info("%s", error)
        elif self._has_sent_slices or not await self._all_answer():
            raise error
        else:
            self._refusal = str(error)
        if self.engines_are_stuck:
            raise error
        await self._leave()  # ends the receives of engines that wait for the trainer
        await self._actors.all(remote(Actor.shards.release))  # all engines have answered
        if self._refusal is not None and isinstance(self._mover, ShardMover):
            await self._mover.disconnect(self._update.receivers)

    async def _all_answer(self) -> bool:
        try:
            await self._update.check_health()
        except SyncError:
            return False
        return True

    def _next_connection(self) -> str:
        self._num_connections += 1
        return connection_name(self._incarnation, self._num_connections)

    async def _leave(self) -> None:
        if self._group_name:
            await self._actors.all(remote(Actor.broadcast.disconnect))
            await self._update.leave_groups(self._group_name, len(self._ports.sync_groups))
            self._group_name = ""
        if self._has_shards:  # outside a session engines leave when they join the next group
            await self._actors.all(remote(Actor.shards.disconnect))
            self._has_shards = False

    async def _sends_slices(self) -> bool:
        """Whether every engine rank receives only what it holds; says why not if asked for."""
        if self._config.sync.update_weight_transport != "slices":
            return False
        if (obstacle := await self._obstacle_to_slices()) is None:
            return True
        logger.warning(
            "--update-weight-transport slices: %s; all engines receive all weights", obstacle
        )
        return False

    async def _obstacle_to_slices(self) -> str | None:
        """Why the engines cannot or should not receive slices; None if they can."""
        if self._refusal is not None:
            return self._refusal
        numbers = {
            "num_engines": len(self._update.receivers),
            "num_trainer_ranks": len(self._actors),
        }
        if (obstacle := obstacle_to_slices(self._config, **numbers)) is not None:
            return obstacle
        if lacking := await self._update.without_shard_loader():
            return f"{', '.join(lacking)} cannot receive slices without rlpost's loader"
        return None

    async def _shard_mover(self, *, max_bytes: int) -> ShardMover:
        self._has_shards = True
        self._backend = await self._actors.first(remote(Actor.broadcast_backend))
        name = self._next_connection()
        where: Meeting | Colocation
        if self._config.cluster.colocate:
            where = Colocation(self._placement.ranks_of_engines)
        else:
            host, port = self._placement.actors[0].ip, self._ports.sync_groups[0]
            where = Meeting(host, port, name, self._backend, self._join_s, self._timeout_s)
        abort = remote(Actor.shards.abort)
        ranks = _ShardRanks(
            self._actors,
            joining=partial(self._joining, abort=abort),
            with_engines=partial(self._with_engines, abort=abort),
            stop=self._stop,
        )
        folder = self._attempt / SLICES / name
        return ShardMover(ranks, where, folder=folder, max_bytes=max_bytes)

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
        joins: list[tuple[str, int, int, str, float]] = [
            ("", 0, ranks, "", self._join_s)
            if stage is None
            else (*addresses[stage], ranks, stage_group(self._group_name, stage), self._join_s)
            for stage in stages
        ]
        self._backend = await self._actors.first(remote(Actor.broadcast_backend))
        joining = self._actors.each([remote(Actor.broadcast.connect, *place) for place in joins])
        await together(
            [
                self._joining(joining, abort=remote(Actor.broadcast.abort)),
                mover.connect(self._update.receivers, addresses, backend=self._backend),
            ]
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
        await self._with_engines(
            self._actors.all(remote(Actor.send_bucket, index)), abort=remote(Actor.broadcast.abort)
        )

    async def _with_engines(
        self, collective: Awaitable[object], *, abort: RemoteCall[Actor, None]
    ) -> None:
        """Await a collective of all ranks and the engines; ``abort`` ends it if an engine failed."""
        try:
            await self._joining(collective, abort=abort)
        except (asyncio.CancelledError, SyncError, TrainerDied, WorkerFailed):
            self._is_abandoned = True
            raise

    async def _joining(
        self, collective: Awaitable[object], *, abort: RemoteCall[Actor, None]
    ) -> None:
        """Like ``_with_engines``, where no engine is blocked if the trainer leaves.

        On NCCL an engine of slices waits in the group's store until the trainer begins the first
        collective, and one of a broadcast waits for nothing.
        """
        try:
            await collective
        except asyncio.CancelledError:
            # An engine failed; the trainer would block until its deadline.
            await self._release_trainer(abort)
            raise

    async def _release_trainer(self, abort: RemoteCall[Actor, None]) -> None:
        """Abort the collective that the trainer is blocked in."""
        try:
            await self._actors.aside(abort)
        except RlpostError as error:
            logger.warning("the trainer could not leave its group with the engines: %s", error)

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
