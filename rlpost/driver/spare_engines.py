"""Spare engines: some of the policy's engines evaluate a version (--eval-engines policy).

Input: the policy's engines and their health, the folder of a version. Output: engines that hold this
version and get the requests of the evaluation alone; the policy has them again afterwards.

    lend: no requests, no weight updates -> read the folder -> evaluate -> give back

An engine that holds the policy's version when it is given back generates at once; one that is behind
does so after the next weight update, which includes it again. One that dies is restarted as any engine
of the policy, and another one takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from common.bounded import await_unless, cancel_all
from rlpost.driver.background_evaluation import SnapshotWeights
from rlpost.driver.engines.engine_health import EngineHealth, Hook
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.engines.connection import RunEngines
from rlpost.engines.engine_side_weights import PauseMode
from rlpost.errors import SyncError
from rlpost.types import EngineAddress

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 1.0
MAX_TRIES = 4
"""Failed updates in a row after which an evaluation fails."""


class SpareEngines:
    """Serves a ``BackgroundEvaluation`` as the health of its engines."""

    def __init__(
        self,
        engines: OwnEngines,
        health: EngineHealth,
        number: int,
        *,
        load_adapters: bool,
        timeout_s: float,
    ) -> None:
        """
        Args:
            engines, health: of the policy's engines.
            number: most engines to take.
            load_adapters, timeout_s: see ``SnapshotWeights``.
        """
        self._engines, self._health, self._number = engines, health, number
        self.weights = SnapshotWeights(self, load_adapters=load_adapters, timeout_s=timeout_s)
        self.serving = RunEngines()
        """The engines that evaluate, for requests."""
        self._lent: Sequence[int] = ()
        self._version = 0

    @property
    def addresses(self) -> tuple[EngineAddress, ...]:
        return tuple(self._engines.addresses[index] for index in self._lent)

    @property
    def api_key(self) -> str:
        return self._engines.api_key

    async def update(self, version: int, *, pause: PauseMode, before: Hook, ready: Hook) -> None:
        """Take engines from the policy and bring them to ``version``. Raises SyncError."""
        self._version = version
        await self._take()

    async def over(self, evaluating: Awaitable[T]) -> T:
        """Return the result of ``evaluating``; replace engines that die; give all back."""
        keeping = asyncio.create_task(self._keep())
        try:
            return await await_unless(evaluating, keeping)
        finally:
            await cancel_all([keeping])
            await self._give_back(self._version)

    def forget_restarts(self) -> None:
        """Do nothing: a trained batch is the progress of the policy's engines."""

    async def _take(self) -> None:
        for tries in range(1, MAX_TRIES + 1):
            self._lent = await self._health.lend(self._number)
            try:
                if self._lent:
                    await self.weights.update(self._version)
                    self._engines.members.evaluates(self._lent, self._version)
                    self.serving.places.set_own(self._engines.places_of(self._lent))
                    return
            except SyncError as error:  # one has died: the health of the policy's engines finds it
                if tries == MAX_TRIES:
                    raise
                logger.warning("%s; the evaluation begins again", error)
            finally:
                # Without weights they may be paused, with those of two versions.
                if not self.serving.places.all():
                    await self._give_back(None)
            await asyncio.sleep(POLL_S)

    async def _keep(self) -> None:
        """Follow the engines that die; take others when none is left."""
        while True:
            left = [index for index in self._lent if index in self._engines.members.lent]
            if left != self._lent:
                self._lent = left
                self.serving.places.set_own(self._engines.places_of(left))
            if not left:
                await self._take()
            await asyncio.sleep(POLL_S)

    async def _give_back(self, version: int | None) -> None:
        """Give all engines back; None: their weights are unknown."""
        lent, self._lent = self._lent, ()
        self.serving.places.set_own(())
        await self._health.give_back(lent, version)
