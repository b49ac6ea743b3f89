"""The engine side of a weight update; ``rlpost.trainer.weights.trainer_side`` is the other side.

Input: addresses of engines, a mover, a version. Output: all engines on the new version, generating
again.

    pause -> begin -> the mover moves the weights -> end -> (ready) -> flush cache -> check version
    -> resume

A mover is a transport from the trainer to the engines: a broadcast to other GPUs, memory handles on
the same GPU, or files. Invariant: no engine generates with weights of two versions. On a failure
the engines stay paused, and the error names the engine that failed; the caller stops them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from common.bounded import together
from rlpost.engines.engine_client import EngineClient, Selector
from rlpost.errors import RolloutError, SyncError
from rlpost.types import Bucket, EngineAddress

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract"]
MAX_CONNECTIONS = 16
"""Number of process group names before one is reused; a later driver of the attempt tries them all.
"""


@dataclass(frozen=True, slots=True)
class Receiver:
    """An engine that receives weights."""

    address: EngineAddress
    client: EngineClient


class TakeHandles(Protocol):
    """Loads a bucket from the handles of an engine's ranks; see ``EngineClient``."""

    def __call__(self, handles: Sequence[str], /, *, version: int | None) -> Awaitable[None]:
        """``version`` comes with the last bucket of an update."""


class Mover(Protocol):
    """A transport for weights. ``in_session``: whether SGLang needs an update session around it."""

    in_session: bool

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """Send all weights to all engines, which are paused; the last message carries the version.

        Raises SyncError, which names the engine that failed.
        """


class WeightUpdate:
    """Updates the weights of a set of engines together."""

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        *,
        api_key: str,
        timeout_s: float = 600.0,
        selector: Selector = "all",
    ) -> None:
        """``selector``: the models that messages with weights fill; files fill all."""
        self.receivers = tuple(
            Receiver(
                engine,
                EngineClient(engine.url, api_key, timeout_s=timeout_s, selector=selector),
            )
            for engine in engines
        )

    async def update(
        self,
        version: int,
        mover: Mover,
        *,
        pause: PauseMode = "abort",
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Bring all engines to ``version``.

        Requests in flight are aborted (``abort``), or resume afterwards with their KV cache
        recomputed by the new weights (``retract``). ``ready`` is awaited once all weights have
        arrived.

        Raises SyncError: an engine failed or reports another version; all engines stay paused.
        """
        started = time.monotonic()
        await self._each("pause", lambda engine: engine.pause(pause))
        if mover.in_session:
            await self._each("open a weight update", lambda engine: engine.begin_weight_update())
            await mover.move(self.receivers, version)
            await self._each("close the weight update", lambda engine: engine.end_weight_update())
        else:
            await mover.move(self.receivers, version)
        if ready is not None:
            await ready()
        await self._each("flush the cache", lambda engine: engine.flush_cache())
        await self._check_version(version)
        await self._each("resume", lambda engine: engine.resume())
        logger.info(
            "policy version %d on %d engines in %.2f s",
            version,
            len(self.receivers),
            time.monotonic() - started,
        )

    async def check_health(self) -> None:
        """Return when all engines answer. Raises SyncError."""
        await self._each("answer", lambda engine: engine.request("GET", "/health", None))

    async def without_shard_loader(self) -> list[str]:
        """URLs of the engines that cannot receive slices. Raises SyncError."""
        answers = await self._each("report their loader", lambda engine: engine.has_shard_loader())
        pairs = zip(self.receivers, answers, strict=True)
        return [one.address.url for one, has_loader in pairs if not has_loader]

    async def _check_version(self, version: int) -> None:
        seen = await self._each("report their version", lambda engine: engine.weight_version())
        wrong = [
            f"engine {one.address.url} has {got!r}"
            for one, got in zip(self.receivers, seen, strict=True)
            if got != str(version)
        ]
        if wrong:
            raise SyncError(
                f"weights of version {version} were sent, but {', '.join(wrong)}; all engines stay paused"
            )

    async def leave_groups(self, group_name: str, num_stages: int) -> None:
        """Destroy the process groups of a broadcast; engines that are not members are skipped."""
        for stage in range(num_stages):
            group = stage_group(group_name, stage)
            leaving = [one.client.destroy_update_group(group) for one in self.receivers]
            for answer in await asyncio.gather(*leaving, return_exceptions=True):
                if isinstance(answer, RolloutError):
                    logger.info("%s", answer)
                elif isinstance(answer, BaseException):
                    raise answer

    async def _each(
        self, what: str, ask: Callable[[EngineClient], Awaitable[object]]
    ) -> list[object]:
        return await all_do(what, [ask(one.client) for one in self.receivers])


class BroadcastMover:
    """Broadcasts to engines on other GPUs, over one process group per pipeline stage."""

    in_session = True

    def __init__(
        self, buckets: Sequence[Bucket], send: Callable[[int], Awaitable[None]], *, group_name: str
    ) -> None:
        """``send(i)`` makes the trainer broadcast ``buckets[i]`` as one uint8 tensor."""
        assert buckets, "an update without weights"
        self._buckets = buckets
        self._send = send
        self._group_name = group_name

    async def connect(
        self, receivers: Sequence[Receiver], sources: Sequence[tuple[str, int]], *, backend: str
    ) -> None:
        """Make all engines join the groups.

        ``sources`` holds (host, port) of rank 0 for each pipeline stage. Returns when the sources
        have joined as well, so they must join concurrently.

        Raises:
            SyncError: an engine could not join; the message names it.
        """
        world_size = 1 + num_engine_ranks(receivers)
        for stage, address in enumerate(sources):
            joining, next_rank = [], 1
            for one in receivers:
                joining.append(
                    one.client.init_update_group(
                        address=address,
                        first_rank=next_rank,
                        world_size=world_size,
                        group_name=stage_group(self._group_name, stage),
                        backend=backend,
                    )
                )
                next_rank += one.address.num_gpus
            await all_do("join the weight-update group", joining)

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """Send each bucket while all engines receive it.

        An engine that refuses never joins the broadcast and would block the sender, so the first
        failure cancels all calls.
        """
        for index, bucket in enumerate(self._buckets):
            last = version if index == len(self._buckets) - 1 else None
            group_name = stage_group(self._group_name, bucket.stage)
            receiving = [
                one.client.update_weights(bucket, group_name=group_name, version=last)
                for one in receivers
            ]
            await all_do(f"take {_described(bucket)}", [*receiving, self._send(index)])


class SharingMover:
    """Shares memory with colocated engines.

    Each trainer rank passes a memory handle to the engine rank on its GPU.
    """

    in_session = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        share: Callable[[int], Awaitable[Sequence[str]]],
        *,
        ranks_of: Sequence[Sequence[int]],
    ) -> None:
        """
        Args:
            share: ``share(i)`` gathers ``buckets[i]`` and returns the handle of each trainer rank.
            ranks_of: for each engine, the trainer ranks on its GPUs, in the order of the engine's
                ranks.
        """
        assert buckets, "an update without weights"
        self._buckets = buckets
        self._share = share
        self._ranks_of = ranks_of

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """Send one bucket after another; see ``share_buckets``."""
        await share_buckets(
            [one.client.update_weights_from_handles for one in receivers],
            self._ranks_of,
            self._share,
            words=[_described(bucket) for bucket in self._buckets],
            version=version,
        )


class NoMover:
    """For a run whose engines are all in other jobs: there is nothing to move."""

    in_session = False

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """Do nothing."""
        assert not receivers, "an engine would keep its weights"


class DiskMover:
    """Writes a Hugging Face folder on storage that trainer and engines share."""

    in_session = False

    def __init__(self, write: Callable[[int], Awaitable[str]]) -> None:
        """``write(version)`` writes the weights and returns their folder."""
        self._write = write

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """Write the weights; all engines read them concurrently."""
        folder = await self._write(version)
        reading = [
            one.client.update_weights_from_disk(folder, version=version) for one in receivers
        ]
        await all_do("read the weights from disk", reading)


class AdapterMover:
    """Writes the adapters as a PEFT folder on storage that trainer and engines share.

    Engines have the base from their model folder and load the adapters beside it.
    """

    in_session = False

    def __init__(self, write: Callable[[int], Awaitable[str]]) -> None:
        """``write(version)`` writes the adapters and returns their folder."""
        self._write = write

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """Write the adapters; all engines load them concurrently."""
        folder = await self._write(version)
        loading = [one.client.replace_adapter(folder, version=version) for one in receivers]
        await all_do("load the adapter", loading)


def num_engine_ranks(receivers: Sequence[Receiver]) -> int:
    """Total number of ranks of all engines."""
    return sum(one.address.num_gpus for one in receivers)


def num_bytes(bucket: Bucket) -> int:
    """Size of a bucket in bytes; the first number in a dtype's name is its number of bits."""
    sizes = [int(re.findall(r"\d+", dtype)[0]) // 8 for dtype in bucket.dtypes]
    return sum(math.prod(shape) * size for shape, size in zip(bucket.shapes, sizes, strict=True))


def connection_name(incarnation: int, number: int) -> str:
    """Name of the ``number``-th connection, from 1, that a driver makes between trainer and engines.

    An engine that a later driver adopts may still be in the groups of the dead one.
    """
    return f"rlpost-{incarnation}-{(number - 1) % MAX_CONNECTIONS + 1}"


def stage_group(name: str, stage: int) -> str:
    """The name of the process group of a pipeline stage."""
    return f"{name}-{stage}"


def _described(bucket: Bucket) -> str:
    return f"{len(bucket.names)} weights starting with {bucket.names[0]}"


async def share_buckets(
    take: Sequence[TakeHandles],
    ranks_of: Sequence[Sequence[int]],
    share: Callable[[int], Awaitable[Sequence[str]]],
    *,
    words: Sequence[str],
    version: int,
) -> None:
    """Let engines load buckets from memory; the next one is filled while they load one.

    The failure of an engine is raised when all others have answered: until then they read memory
    that the trainer frees or overwrites after the failure.

    Args:
        take: loads a bucket into an engine, for each engine.
        ranks_of: see ``SharingMover``.
        share: ``share(i)`` fills bucket i and returns the handle of each trainer rank.
        words: name each bucket in messages.
        version: comes with the last bucket.

    Raises SyncError, which names the engine.
    """
    handles = await share(0)
    for index, what in enumerate(words):
        is_last = index == len(words) - 1
        taking = [
            _failure_of(
                load([handles[rank] for rank in ranks], version=version if is_last else None)
            )
            for load, ranks in zip(take, ranks_of, strict=True)
        ]
        following = [] if is_last else [share(index + 1)]
        answers = await together([*taking, *following])
        for answer in answers:
            if isinstance(answer, RolloutError):
                raise SyncError(f"the engines could not all take {what}; {answer}") from answer
        handles = cast("Sequence[str]", answers[-1])


async def _failure_of(call: Awaitable[object]) -> RolloutError | None:
    """Await the call of an engine; return its error."""
    try:
        await call
    except RolloutError as error:
        return error
    return None


async def all_do(what: str, calls: Sequence[Awaitable[object]]) -> list[object]:
    """Like ``together``; the failure of an engine is a SyncError with the engine's name."""
    try:
        return await together(calls)
    except RolloutError as error:
        raise SyncError(f"the engines could not all {what}; {error}") from error
