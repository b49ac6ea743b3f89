"""The parts of a full run that start with the trainer's ranks, for ``trainer_recovery``.

Input: startup, engines and their weights. Output: ranks in the order in which shared GPUs, process
groups and connections need it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rlpost.driver.engines.engine_health import EngineHealth
from rlpost.driver.offload import Offload
from rlpost.driver.placement import Placement, Ports
from rlpost.driver.standby import Standby
from rlpost.driver.startup import Startup
from rlpost.driver.training import Training
from rlpost.driver.weight_coordinator import WeightCoordinator
from rlpost.driver.worker_groups import Actor, ActorGroup, remote


class TrainerRanks:
    """Starts the trainer's ranks, and connects them with the engines that stay."""

    def __init__(
        self,
        startup: Startup,
        ports: Ports,
        group: ActorGroup,
        *,
        offload: Offload,
        weights: WeightCoordinator,
        engine_health: EngineHealth,
        standby: Standby,
    ) -> None:
        """``group``: the ranks whose workers are replaced."""
        self._standby = standby
        self._gpus: list[str] = []
        self._startup, self._ports, self._group = startup, ports, group
        self._offload, self._weights, self._engine_health = offload, weights, engine_health

    def engines_hold_gpus(self) -> bool:
        """Whether engines on the trainer's GPUs hold their memory."""
        return self._offload.engines_hold_gpus()

    def paused(self) -> AbstractAsyncContextManager[object]:
        """Return a context with exclusive use of the ranks: no engine is repaired within it."""
        return self._engine_health.paused()

    async def prepare(self) -> None:
        """Offload engines on the trainer's GPUs: new ranks begin onloaded."""
        await self._engine_health.leave_lost()
        await self._offload.free_gpus()

    async def create(self, placement: Placement) -> ActorGroup:
        """Create a process for each rank, or use its standby."""
        await self._engine_health.begin_lost(placement)
        return await self._startup.workers(placement, await self._standby.take(placement))

    async def set_up(self, placement: Placement, checkpoint: Path | None) -> Training:
        """Form the groups of the new ranks; load ``checkpoint`` or the initial weights."""
        return await self._startup.trainer(
            self._group, placement, self._ports, checkpoint, is_compared=False
        )

    async def note_gpus(self) -> None:
        """Remember the GPUs of ranks that have started."""
        gpus = await self._group.all(remote(Actor.visible_gpu))
        self._offload.ranks_see(gpus)
        have_gpus = await self._group.all(remote(Actor.has_gpu))
        self._gpus = [gpu if has else "" for gpu, has in zip(gpus, have_gpus, strict=True)]

    def stand_by(self, placement: Placement) -> None:
        """Start missing standbys, without waiting for them."""
        self._standby.start(placement, self._gpus)

    async def connect(self, placement: Placement) -> None:
        """Connect the engines with the new ranks; their weights do not change."""
        self._weights.move(placement)
        await self._engine_health.reconnect()
