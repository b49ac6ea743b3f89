"""The engines' half of a weight update. The trainer's half broadcasts; here the engines are told to receive.

Comes in: addresses of engines, buckets, a version, and ``send``, which broadcasts bucket ``i`` from rank 0. Goes out:
all engines on the new version, generating again.

    pause -> begin -> for each bucket (all engines receive while send runs) -> end -> flush cache -> version? -> resume

Invariant: no engine generates with weights of two versions. If anything fails, the engines stay paused and the error
names the one that failed; the caller ends them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from rlpost.errors import RolloutError, SyncError
from rlpost.rollout.client import EngineClient
from rlpost.types import Bucket, EngineAddress

logger = logging.getLogger(__name__)

Send = Callable[[int], Awaitable[None]]


class WeightUpdate:
    """A set of engines that share one process group with the sender."""

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        *,
        api_key: str,
        group_name: str = "rlpost",
        backend: str = "gloo",
        timeout_s: float = 600.0,
    ) -> None:
        self._addresses = tuple(engines)
        self._clients = tuple(EngineClient(engine.url, api_key, timeout_s=timeout_s) for engine in engines)
        self._group_name = group_name
        self._backend = backend
        self._timeout_s = timeout_s

    @property
    def num_engine_ranks(self) -> int:
        """Ranks of all engines together; the sender is one more."""
        return sum(engine.num_gpus for engine in self._addresses)

    async def connect(self, master_addr: str, master_port: int) -> None:
        """All engines join the group whose rank 0 is at ``master_addr:master_port``.

        Returns when the sender has joined too, so its own joining must run at the same time.

        Raises:
            SyncError: naming the engine that could not.
        """
        joining, next_rank = [], 1
        for address, client in zip(self._addresses, self._clients, strict=True):
            joining.append(
                client.init_update_group(
                    address=(master_addr, master_port),
                    first_rank=next_rank,
                    world_size=1 + self.num_engine_ranks,
                    group_name=self._group_name,
                    backend=self._backend,
                )
            )
            next_rank += address.num_gpus
        await _all("join the weight-update group", joining)

    async def disconnect(self) -> None:
        """All engines leave the group."""
        await self._each("leave the weight-update group", lambda engine: engine.destroy_update_group(self._group_name))

    async def update(self, buckets: Sequence[Bucket], version: int, send: Send) -> None:
        """Move all engines to ``version``. ``send(i)`` broadcasts ``buckets[i]``, flattened to one uint8 tensor.

        Raises:
            SyncError: an engine failed or reports another version; all engines stay paused.
        """
        assert buckets, "an update without weights"
        started = time.monotonic()
        await self._each("pause", lambda engine: engine.pause("abort"))
        has_session = await self._each("open a weight update", lambda engine: engine.begin_weight_update())
        for index, bucket in enumerate(buckets):
            await self._receive(bucket, version if index == len(buckets) - 1 else None, send(index))
        in_session = [engine for engine, opened in zip(self._clients, has_session, strict=True) if opened]
        await _all("close the weight update", [engine.end_weight_update() for engine in in_session])
        await self._each("flush the cache", lambda engine: engine.flush_cache())
        await self._check_version(version)
        await self._each("resume", lambda engine: engine.resume())
        logger.info(
            "policy version %d on %d engines in %.2f s", version, len(self._clients), time.monotonic() - started
        )

    async def _receive(self, bucket: Bucket, version: int | None, sending: Awaitable[None]) -> None:
        """Let every engine receive one bucket while it is sent.

        An engine that refuses never joins the broadcast, and the sender would wait for it: hence the first failure
        ends the wait for all.
        """
        what = f"take {len(bucket.names)} weights from {bucket.names[0]} on"
        receiving = [
            engine.update_weights(bucket, group_name=self._group_name, version=version) for engine in self._clients
        ]
        await _all(what, [*receiving, sending])

    async def _check_version(self, version: int) -> None:
        seen = await self._each("tell their version", lambda engine: engine.weight_version())
        wrong = [
            f"engine {engine.url} has {got!r}"
            for engine, got in zip(self._clients, seen, strict=True)
            if got != str(version)
        ]
        if wrong:
            raise SyncError(f"weights of version {version} were sent, but {', '.join(wrong)}; all engines stay paused")

    async def _each(self, what: str, ask: Callable[[EngineClient], Awaitable[object]]) -> list[object]:
        return await _all(what, [ask(engine) for engine in self._clients])


async def _all(what: str, calls: Sequence[Awaitable[object]]) -> list[object]:
    """Results in order. The first failure ends the others and becomes a SyncError, which names the engine."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except RolloutError as error:
        raise SyncError(f"the engines could not all {what}; {error}") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
