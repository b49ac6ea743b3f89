"""The watch over the engines: one that is dead or hangs is restarted and given the current weights before it serves.

In: the fleet and the way of the weights. Out: a router and engines that all answer and all hold one version, or an
error. While an engine is away its requests finish elsewhere (the router tries them again), so no prompt is lost and
none is answered twice. An engine that shares the trainer's GPUs cannot be given weights while the trainer is away: it
is taken out at once and comes back with the next update.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from rlpost.config.tree import Config
from rlpost.errors import EngineDied, SyncError
from rlpost.orchestration.engines import Fleet
from rlpost.orchestration.preemption import StopRequest
from rlpost.orchestration.weight_coordinator import WeightCoordinator
from rlpost.rollout.engine_side_weights import PauseMode

logger = logging.getLogger(__name__)

Hook = Callable[[], Awaitable[None]]


class EngineHealth:
    """Updates and repairs, one at a time."""

    def __init__(self, config: Config, fleet: Fleet, weights: WeightCoordinator, *, stop: StopRequest) -> None:
        """Args: ``stop``: a requested one ends a repair that waits for engines to start, and the health checks, for
        the engines may have been ended already."""
        self._stop = stop
        self._interval_s = config.sglang.rollout_health_check_interval
        self._shares_gpus = config.cluster.colocate
        self._fleet = fleet
        self._weights = weights
        self._busy = asyncio.Lock()
        self._version = 0  # of the trainer's weights

    def trained(self) -> None:
        """The trainer has the weights of the next version; a repair from now on gives these to all engines."""
        self._version += 1

    async def update(self, version: int, *, pause: PauseMode, before: Hook, ready: Hook) -> None:
        """Bring all engines to ``version``; engines that fail meanwhile, or were dismissed, are restarted first.

        ``before`` is awaited before weights are sent, and again before they are sent anew; ``ready`` once they arrived.

        Raises SyncError when the update fails though every engine answers, or fails again.
        """
        async with self._busy:
            self._version, sick = version, list[int]()
            await before()
            if not self._fleet.dismissed:
                try:
                    await self._weights.update(version, pause=pause, ready=ready)
                    return
                except SyncError as error:
                    sick = await self._fleet.unhealthy(generating=False)
                    if not sick and not self._fleet.dismissed:
                        raise
                    logger.warning("%s", error)
                    if self._weights.engines_are_stuck:
                        sick = list(range(len(self._fleet.addresses)))
                        logger.warning("all engines are restarted: those that answer wait in the same broadcast")
                await before()
            await self._repair(sorted({*sick, *self._fleet.dismissed}), version, pause=pause, ready=ready)

    @contextlib.asynccontextmanager
    async def over(self) -> AsyncIterator[None]:
        """Look after the engines while the block generates; a repair that fails ends the block with its error. At a
        stop request it does not: the block looks for that itself, and cuts off what runs."""
        block = asyncio.current_task()
        assert block is not None
        failure: list[BaseException] = []

        async def watch() -> None:
            try:
                while not self._stop.requested():
                    await asyncio.sleep(self._interval_s)
                    await self._look()
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if self._stop.requested():
                    logger.warning("engines are not repaired: %s", error)
                else:
                    failure.append(error)
                    block.cancel()

        asked_before = block.cancelling()
        watching = asyncio.create_task(watch())
        try:
            try:
                yield
                async with self._busy:  # a repair under way is not torn: its engine starts already
                    watching.cancel()
            finally:
                watching.cancel()
                await asyncio.wait([watching])  # a repair that fails in this instant cancels the block here
        except asyncio.CancelledError:
            if failure and block.uncancel() <= asked_before:  # nobody else wants the block to end
                raise failure[0] from None
            raise

    async def _look(self) -> None:
        async with self._busy:
            sick = await self._fleet.unhealthy(generating=True)
            await self._fleet.mend_router(sick)
            if sick and not self._shares_gpus:
                await self._repair(sick, self._version, pause=self._fleet.pause_mode, ready=_nothing)
                return
            for index in sick:
                await self._fleet.dismiss(index)
            if len(self._fleet.dismissed) == len(self._fleet.addresses):
                raise EngineDied("no engine is left, and on GPUs that the trainer shares none can come back before it")

    async def _repair(self, sick: Sequence[int], version: int, *, pause: PauseMode, ready: Hook) -> None:
        await self._fleet.mend_router(sick)
        for index in set(sick) - self._fleet.dismissed:
            await self._fleet.dismiss(index)
        await self._stop.unless_requested(asyncio.gather(*(self._fleet.restart(index) for index in sick)))
        await self._weights.connect()
        await self._weights.update(version, pause=pause, ready=ready)
        for index in sick:
            await self._fleet.admit(index)
        logger.info("%d engines restarted, at policy version %d", len(sick), version)


async def _nothing() -> None:
    pass
