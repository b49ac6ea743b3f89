"""Offload and onload of trainer and engines that share GPUs.

Input: the actors, the engines, and which sides are offloaded (``--offload-train``,
``--offload-rollout``; both with ``--colocate``). Without these flags this module does nothing. GPU
memory in the phases of a step:

    start of an engine  trainer offloaded, no shared buckets
    send                only the weights of trainer and engines, and the shared buckets
    generate            trainer offloaded, engines onloaded
    train               engines offloaded, trainer onloaded
    save                the trainer's weights and optimizer, the engines' weights
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rlpost.config.tree import Config
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.worker_groups import Actor, ActorGroup, remote
from rlpost.errors import MemoryHeld

WEIGHTS, GRADS, OPTIMIZER = "weights", "grads", "optimizer"  # rlpost.trainer.memory
ALL = (WEIGHTS, GRADS, OPTIMIZER)
SAVED = (WEIGHTS, OPTIMIZER)
"""The parts that a checkpoint holds; gradients would take memory that engines use."""
CACHE = ("kv_cache", "cuda_graph")


class Offload:
    """Moves both sides to the memory state of a phase; no-op when they are in it."""

    def __init__(self, config: Config, actors: ActorGroup, engines: OwnEngines) -> None:
        """Initially both sides are onloaded."""
        self._trainer_leaves = config.offload_train
        self._engines_leave = config.offload_rollout
        self._actors = actors
        self._engines = engines

    def ranks_see(self, gpus: Sequence[str]) -> None:
        """Record the GPUs of ranks that have started; engines that start later share them."""
        self._engines.visible_gpus = gpus

    async def free_gpus(self) -> None:
        """Offload the engines, for ranks that are started again: these begin onloaded."""
        if self._engines_leave:
            await self._engines.release_memory(*CACHE, "weights")

    def engines_hold_gpus(self) -> bool:
        """Whether engines on the trainer's GPUs have their memory onloaded."""
        return self._engines_leave and not self._engines.is_released("kv_cache")

    async def train(self) -> None:
        """Offload the engines, onload the trainer."""
        await self.free_gpus()
        await self._onload_trainer(*ALL)

    async def send(self) -> None:
        """Keep only the weights of both sides onloaded, if the side can be offloaded."""
        # In this order each call frees the memory on shared GPUs that the next one needs.
        if self._engines_leave:
            await self._engines.release_memory(*CACHE)
        if self._trainer_leaves:
            await self._actors.all(remote(Actor.memory.offload, GRADS, OPTIMIZER))
        await self._onload_trainer(WEIGHTS)
        if self._engines_leave:
            await self._engines.restore_memory("weights")

    async def _onload_trainer(self, *parts: str) -> None:
        """Onload parts of the trainer, if it can be offloaded.

        Raises MemoryHeld, which names the engine that has not freed its memory.
        """
        if not self._trainer_leaves:
            return
        try:
            await self._actors.all(remote(Actor.memory.restore, *parts))
        except MemoryHeld as error:
            name = self._engines.engine_on_gpu_of(error.rank)
            if name is None:
                raise
            raise MemoryHeld(
                f"{error}; {name} shares this GPU and has answered that it released its memory: see "
                f"{name}-server.log in the attempt's folder; a lower --sglang-mem-fraction-static leaves more free",
                error.rank,
            ) from None

    async def offload_trainer(self) -> None:
        """Offload the trainer and free the shared buckets; then engines can start on its GPUs.

        SGLang sizes the KV cache by the memory that is free when the engine starts. Engines that
        took part in a failed update must have answered or ended before: they read the buckets.
        """
        if self._trainer_leaves:
            await self._actors.all(remote(Actor.sharing.release))
            await self._actors.all(remote(Actor.shards.release))
            await self._actors.all(remote(Actor.memory.offload, *ALL))

    async def generate(self) -> None:
        """Offload the trainer, onload the engines; they stay paused."""
        await self.offload_trainer()
        if self._engines_leave:
            await self._engines.restore_memory("weights", *CACHE)

    @asynccontextmanager
    async def weights_onloaded(self) -> AsyncIterator[None]:
        """Onload the trainer's weights inside the block, while engines on other GPUs generate.

        After an error nothing moves: the run ends, or its ranks are started again.
        """
        await self.send()
        yield
        await self.generate()

    @asynccontextmanager
    async def save(self, *, is_last: bool = False) -> AsyncIterator[None]:
        """Onload the trainer's weights and optimizer; undo it after the block unless ``is_last``.

        After an error nothing moves: the run ends, or its ranks are started again.
        """
        was_offloaded = self._trainer_leaves and not self._engines.is_released("kv_cache")
        if was_offloaded and self._engines_leave:
            await self._engines.release_memory(*CACHE)
        await self._onload_trainer(*SAVED)
        yield
        if was_offloaded and not is_last:
            await self.generate()
            await self._engines.resume()
