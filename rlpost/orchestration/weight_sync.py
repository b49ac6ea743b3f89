"""From the trainer's weights to the engines': which way they take, and who may do it when.

In: settings, the actors, the fleet. Out: all engines on a version. One update runs at a time. After an engine was
restarted the groups are formed anew, because a process group has no way to take a new member.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.orchestration.engines import Fleet
from rlpost.orchestration.placement import Placement, Ports
from rlpost.orchestration.workers import WorkerGroup
from rlpost.rollout.weight_update import (
    BroadcastMover,
    DiskMover,
    Mover,
    PauseMode,
    SharingMover,
    WeightUpdate,
    num_engine_ranks,
    stage_group,
)

logger = logging.getLogger(__name__)


class WeightSync:
    """The way between ``actors`` and the engines of ``fleet``. ``connect`` first."""

    def __init__(
        self, config: Config, fleet: Fleet, actors: WorkerGroup, *, placement: Placement, ports: Ports, folder: Path
    ) -> None:
        """Args: ``folder`` is seen by all nodes; weights pass through it with ``--update-weight-transport disk``."""
        self._config = config
        self._fleet = fleet
        self._actors = actors
        self._placement = placement
        self._ports = ports
        self._folder = Path(config.sync.update_weight_disk_dir or folder)
        self._num_connections = 0
        self._group_name = ""

    async def connect(self) -> None:
        """Find out what there is to send and open the way; called again after an engine was restarted.

        Raises SyncError, naming the engine that did not come.
        """
        timeout_s = 60.0 * self._config.cluster.distributed_timeout_minutes
        self._update = WeightUpdate(self._fleet.addresses, api_key=self._fleet.api_key, timeout_s=timeout_s)
        buckets = (await self._actors.call("buckets.plan"))[0]
        self._mover: Mover
        if self._config.sync.update_weight_transport == "disk":
            if any(dtype.startswith("float8") for bucket in buckets for dtype in bucket.dtypes):
                raise ConfigError(
                    "sync.update_weight_transport = 'disk': the checkpoint is in FP8, and files hold the trainer's "
                    "precision; use 'memory'"
                )
            self._mover = DiskMover(self._write)
        elif self._config.cluster.colocate:
            self._mover = SharingMover(buckets, self._share, ranks_of=self._placement.ranks_of_engines)
        else:
            await self._leave()
            self._num_connections += 1
            self._group_name = f"rlpost-{self._num_connections}"
            mover = BroadcastMover(buckets, self._send, group_name=self._group_name)
            await self._form_groups(mover)
            self._mover = mover

    async def update(
        self, version: int, *, pause: PauseMode = "abort", ready: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Bring all engines to ``version``; see ``WeightUpdate.update``."""
        await self._update.update(version, self._mover, pause=pause, ready=ready)

    async def _leave(self) -> None:
        if self._group_name:
            await self._actors.call("broadcast.disconnect")
            await self._update.leave_groups(self._group_name, len(self._ports.sync_groups))

    async def _form_groups(self, mover: BroadcastMover) -> None:
        """One group for each pipeline stage: its source and all engine ranks."""
        stages = await self._actors.call("sync_stage")
        sources = {stage: rank for rank, stage in enumerate(stages) if stage is not None}
        hosts = [self._placement.actors[sources[stage]].ip for stage in sorted(sources)]
        addresses = list(zip(hosts, self._ports.sync_groups, strict=True))
        ranks = num_engine_ranks(self._update.receivers)
        own = [
            ("", 0, ranks, "") if stage is None else (*addresses[stage], ranks, stage_group(self._group_name, stage))
            for stage in stages
        ]
        backend = (await self._actors.call("broadcast.backend"))[0]
        await asyncio.gather(
            self._actors.call_each("broadcast.connect", own),
            mover.connect(self._update.receivers, addresses, backend=backend),
        )

    async def _send(self, index: int) -> None:
        await self._actors.call("send_bucket", index)

    async def _share(self, index: int) -> list[str]:
        return await self._actors.call("share_bucket", index)

    async def _write(self, version: int) -> list[str]:
        """A folder of this version; the one before is removed: all engines have read it."""
        folder = self._folder / f"version-{version:07d}"
        await self._actors.call("export", str(folder))
        for old in self._folder.glob("version-*"):
            if old != folder:
                await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        return [str(folder)] * len(self._fleet.addresses)
