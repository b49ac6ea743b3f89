"""Offload and onload of trainer and engines that share GPUs.

Input: the actors, the fleet, and which sides are offloaded (``--offload-train``, ``--offload-rollout``; both with
``--colocate``). Without these flags this module does nothing. GPU memory in the phases of a step:

    train      engines offloaded, trainer onloaded
    send       only the weights of trainer and engines
    generate   trainer offloaded, engines onloaded
    save       the trainer's weights and optimizer, the engines' weights
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from rlpost.config.tree import Config
from rlpost.orchestration.engines import Fleet
from rlpost.orchestration.worker_groups import ActorGroup

WEIGHTS, GRADS, OPTIMIZER = "weights", "grads", "optimizer"  # rlpost.actor.memory
CACHE = ("kv_cache", "cuda_graph")

Turn = Literal["train", "send", "generate"]


class Offload:
    """Brings both sides to a turn; a turn that is already theirs costs nothing."""

    def __init__(self, config: Config, actors: ActorGroup, fleet: Fleet) -> None:
        """Both sides are whole at first."""
        self._trainer_leaves = config.offload_train
        self._engines_leave = config.offload_rollout
        self._actors = actors
        self._fleet = fleet

    async def train(self) -> None:
        """Everything of the trainer here, nothing of the engines."""
        if self._engines_leave:
            await self._fleet.release_memory(*CACHE, "weights")
        if self._trainer_leaves:
            await self._actors.restore_memory(WEIGHTS, GRADS, OPTIMIZER)

    async def send(self) -> None:
        """Weights on both sides, and nothing else where it can leave."""
        if self._engines_leave:
            await self._fleet.release_memory(*CACHE)
        if self._trainer_leaves:
            await self._actors.offload_memory(GRADS, OPTIMIZER)
            await self._actors.restore_memory(WEIGHTS)
        if self._engines_leave:
            await self._fleet.restore_memory("weights")

    async def generate(self) -> None:
        """The trainer away, everything of the engines here; they stay paused."""
        if self._trainer_leaves:
            await self._actors.release_shared_buckets()
            await self._actors.offload_memory(WEIGHTS, GRADS, OPTIMIZER)
        if self._engines_leave:
            await self._fleet.restore_memory("weights", *CACHE)

    @asynccontextmanager
    async def save(self, *, is_last: bool = False) -> AsyncIterator[None]:
        """What a checkpoint holds is here within; afterwards it is as it was, or stays when nothing is generated any
        more."""
        was_away = self._trainer_leaves and not self._fleet.is_released("kv_cache")
        if was_away and self._engines_leave:
            await self._fleet.release_memory(*CACHE)
        if self._trainer_leaves:
            await self._actors.restore_memory(WEIGHTS, OPTIMIZER)
        try:
            yield
        finally:
            if was_away and not is_last:
                await self.generate()
                await self._fleet.resume()
