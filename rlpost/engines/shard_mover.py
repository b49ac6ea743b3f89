"""Move weights from shard to shard: each engine rank receives only the slices that it holds.

Input: engines with the loader of ``rlpost.engines.shards``, and the trainer's ranks. Output: the
weights of a version in all engines. At its first update a mover lets the engines record what their
models load, plans who sends what (``rlpost.config.plan.shard_plan``), and distributes the plan;
later updates only move buckets.

    record -> plan -> connect -> bucket 0, 1, ...

Files are in a folder that all nodes share: they are as large as the lists of all tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlpost.config.plan.shard_plan import ShardPlan, Unit, check_complete, joined_units, plan_shards
from rlpost.config.plan.shard_roles import RankPlan, rank_plans, receiver_plans
from rlpost.engines.engine_side_weights import (
    Receiver,
    all_do,
    num_engine_ranks,
    share_buckets,
)
from rlpost.engines.load_check import boxes_of, check_ranks, record_loads, tensor_types, write_json
from rlpost.engines.shards.messages import plan_to_json, serialised
from rlpost.errors import (
    EngineDied,
    EngineNotPrepared,
    PlanOutdated,
    RolloutError,
    SlicesRefused,
    SyncError,
    WeightError,
)
from rlpost.models.regions import BoxGroup

logger = logging.getLogger(__name__)
Description = tuple[Sequence[Unit], Sequence[BoxGroup], frozenset[str]]
"""Of a trainer rank: the units of the model, its boxes, the tensors that it helps to gather."""
SLICES = "slices"
"""Folder of an attempt with one for each group that a driver forms."""
REFUSAL_S = 5.0
"""Seconds in which a bucket that an engine refuses can still reach all ranks.

An engine refuses most buckets after it has received them. Others may still receive, and on NCCL a
receive whose sender leaves never ends.
"""


class ShardTrainer(Protocol):
    """The trainer's ranks, as ``rlpost.trainer.weights.shard_transport`` has them."""

    async def describe(self) -> Sequence[Description]:
        """Describe every rank."""

    async def use(self, plans: Sequence[RankPlan]) -> None:
        """Give every rank its part of the plan."""

    async def connect(self, num_engine_ranks: int, meeting: Meeting) -> None:
        """Form the group of all trainer ranks and the engine ranks. Raises SyncError."""

    async def pack(self, index: int) -> None:
        """Pack a bucket for the engine ranks."""

    async def send(self, index: int) -> None:
        """Send the packed bucket to the engine ranks."""

    async def share(self, index: int, message: Mapping[str, object]) -> Sequence[str]:
        """Exchange a bucket; return a handle of ``message`` with its bytes for each trainer rank."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the first trainer rank listens for the group, which is formed under ``name``.

    All ranks must join within ``join_s`` seconds; ``timeout_s`` is the deadline of a bucket.
    """

    host: str
    port: int
    name: str
    backend: str
    join_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Colocation:
    """Trainer ranks on each engine's GPUs, in the engine's order."""

    ranks_of: Sequence[Sequence[int]]


class ShardMover:
    """Sends each engine rank the slices that it holds; see ``Mover``."""

    in_session = True

    def __init__(
        self, trainer: ShardTrainer, where: Meeting | Colocation, *, folder: Path, max_bytes: int
    ) -> None:
        """``max_bytes`` bounds what a rank sends or receives at a time."""
        self._trainer = trainer
        self._where = where
        self._folder = folder
        self._max_bytes = max_bytes
        self._message_ids = itertools.count()
        self._num_buckets = 0  # until all engines have recorded, have the plan, and are connected

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """Send all buckets; the failure of an engine cancels the calls of all others.

        Raises:
            SyncError: an engine died; the message names it.
            PlanOutdated: an engine has changed or was started again; a new mover mends it.
            SlicesRefused: an engine failed otherwise; the message names it.
            WeightError: the engines have another model than the trainer.
        """
        try:
            await self._move(receivers, version)
        except SyncError as error:
            if isinstance(error.__cause__, EngineDied):
                raise
            if isinstance(error.__cause__, EngineNotPrepared):
                raise PlanOutdated(str(error)) from error
            raise SlicesRefused(str(error)) from error

    async def disconnect(self, receivers: Sequence[Receiver]) -> None:
        """Let the engines leave the group, in a session; those that cannot are skipped."""
        message = self._message("disconnect")
        leaving = [self._tell(one, message, version=None) for one in receivers]
        for answer in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(answer, RolloutError):
                logger.info("%s", answer)
            elif isinstance(answer, BaseException):
                raise answer

    async def _move(self, receivers: Sequence[Receiver], version: int) -> None:
        if not self._num_buckets:
            await self._prepare(receivers)
        if isinstance(self._where, Colocation):
            await share_buckets(
                [one.client.send_to_loader for one in receivers],
                self._where.ranks_of,
                self._share,
                words=[self._described(index) for index in range(self._num_buckets)],
                version=version,
            )
        else:
            await self._send_all(receivers, version)

    async def _send_all(self, receivers: Sequence[Receiver], version: int) -> None:
        await self._trainer.pack(0)
        for index in range(self._num_buckets):
            message = self._message("receive", bucket=index)
            last = self._version_with(index, version)
            sent = asyncio.Event()
            receiving = [
                _receive(self._tell(one, message, version=last), sent) for one in receivers
            ]
            await all_do(f"take {self._described(index)}", [*receiving, self._send(index, sent)])

    async def _send(self, index: int, sent: asyncio.Event) -> None:
        """Send a bucket, then pack the next one while the engines load it."""
        await self._trainer.send(index)
        sent.set()
        if index + 1 < self._num_buckets:
            await self._trainer.pack(index + 1)

    def _share(self, index: int) -> Awaitable[Sequence[str]]:
        return self._trainer.share(index, self._message("apply", bucket=index))

    async def _prepare(self, receivers: Sequence[Receiver]) -> None:
        """Record, plan, and connect."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._num_buckets = await self._num_planned(receivers)
        finally:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _num_planned(self, receivers: Sequence[Receiver]) -> int:
        described = await self._trainer.describe()
        types = tensor_types(described[0][0])
        files = await record_loads(
            receivers, types, folder=self._folder, message_id=self._next_id()
        )
        beside: dict[int, int] = {}
        if isinstance(self._where, Colocation):
            beside = dict(enumerate(itertools.chain.from_iterable(self._where.ranks_of)))
        plan = await asyncio.to_thread(
            _plan, described, files, max_bytes=self._max_bytes, beside=beside
        )
        await self._distribute(receivers, list(types), plan)
        gathered = [names for _, _, names in described]
        await self._trainer.use(await asyncio.to_thread(rank_plans, plan, gathered))
        if isinstance(self._where, Meeting):
            await self._connect(receivers, self._where, len(described))
        return len(plan.buckets)

    async def _distribute(
        self, receivers: Sequence[Receiver], tensors: Sequence[str], plan: ShardPlan
    ) -> None:
        """Give each engine rank the boxes that each bucket brings it."""
        files = await asyncio.to_thread(
            _write_plans, self._folder, tensors, plan, num_engine_ranks(receivers)
        )
        telling, rest = [], iter(files)
        for one in receivers:
            message = self._message("plan")
            of_engine = itertools.islice(rest, one.address.num_gpus)
            payloads = [serialised(message | {"file": str(file)}) for file in of_engine]
            telling.append(one.client.send_to_loader(payloads))
        await all_do("read the plan of the update", telling)

    async def _connect(
        self, receivers: Sequence[Receiver], meeting: Meeting, num_trainer_ranks: int
    ) -> None:
        """Form one group: the trainer's ranks, then those of the engines in order."""
        num_ranks = num_engine_ranks(receivers)
        message = self._message(
            "connect",
            host=meeting.host,
            port=meeting.port,
            name=meeting.name,
            backend=meeting.backend,
            join_s=meeting.join_s,
            timeout_s=meeting.timeout_s,
            folder=str(self._folder),
            world_size=num_trainer_ranks + num_ranks,
        )
        joining, rank = [], num_trainer_ranks
        for one in receivers:
            ranks = range(rank, rank + one.address.num_gpus)
            payloads = [serialised(message | {"rank": each}) for each in ranks]
            joining.append(one.client.send_to_loader(payloads))
            rank = ranks.stop
        try:
            await all_do(
                "join the weight-update group",
                [*joining, self._trainer.connect(num_ranks, meeting)],
            )
        except SyncError as error:
            raise SyncError(f"{error} ({_ranks_of_group(receivers, num_trainer_ranks)})") from (
                error.__cause__ or error
            )

    def _tell(
        self, one: Receiver, message: Mapping[str, object], *, version: int | None
    ) -> Awaitable[None]:
        """Send the same message to all ranks of an engine."""
        payloads = [serialised(message)] * one.address.num_gpus
        return one.client.send_to_loader(payloads, version=version)

    def _message(self, do: str, **fields: object) -> dict[str, object]:
        return {"do": do, "id": self._next_id(), **fields}

    def _next_id(self) -> str:
        return f"{self._folder.name}-{next(self._message_ids)}"

    def _version_with(self, index: int, version: int) -> int | None:
        return version if index == self._num_buckets - 1 else None

    def _described(self, index: int) -> str:
        return f"bucket {index + 1} of {self._num_buckets}"


async def _receive(call: Awaitable[None], sent: asyncio.Event) -> None:
    """Await the call of an engine; raise its refusal once the bucket is sent, or after a time."""
    try:
        await call
    except EngineDied:
        raise
    except RolloutError:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sent.wait(), REFUSAL_S)
        raise


def _ranks_of_group(receivers: Sequence[Receiver], num_trainer_ranks: int) -> str:
    """Whose ranks a group has: ``ranks from 0 are the trainer's, from 4 those of http://...``."""
    words, first = ["ranks from 0 are the trainer's"], num_trainer_ranks
    for one in receivers:
        words.append(f"from {first} those of {one.address.url}")
        first += one.address.num_gpus
    return ", ".join(words)


def _write_plans(
    folder: Path, tensors: Sequence[str], plan: ShardPlan, num_receivers: int
) -> list[Path]:
    """Write what each bucket brings to each engine rank; return the files in order."""
    files = []
    for receiver, buckets in enumerate(receiver_plans(plan, num_receivers)):
        files.append(folder / f"plan-{receiver}.json")
        write_json(files[-1], plan_to_json(tensors, buckets))
    return files


def _plan(
    described: Sequence[Description],
    files: Mapping[str, Sequence[Path]],
    *,
    max_bytes: int,
    beside: Mapping[int, int],
) -> ShardPlan:
    """Plan from the descriptions of the trainer's ranks and the answers of each engine's."""
    together: set[tuple[str, ...]] = set()
    reasons: dict[str, str] = {}

    needed: dict[str, list[list[BoxGroup]]] = {}

    names = list(tensor_types(described[0][0]))
    answers = {
        url: [json.loads(file.read_text()) for file in of_ranks] for url, of_ranks in files.items()
    }
    try:
        for url, of_ranks in answers.items():
            for answer in of_ranks:
                together.update(map(tuple, answer["together"]))
                reasons.update(answer["reasons"])
                needed.setdefault(url, []).append(boxes_of(answer, names))
        check_complete(described[0][0], needed)
        for url, of_ranks in answers.items():
            check_ranks(url, of_ranks, names)
    except WeightError:
        raise
    except (ValueError, TypeError, LookupError) as error:
        # No failure of the run, as in ``LoadCheck``: the engines get all weights instead.
        raise SyncError(
            f"{url} does not say what it loads as this version of rlpost does: {type(error).__name__}: {error}"
        ) from error
    plan = plan_shards(
        joined_units(described[0][0], together),
        [boxes for _, boxes, _ in described],
        list(itertools.chain.from_iterable(needed.values())),
        max_bytes=max_bytes,
        beside=beside,
    )
    logger.info(
        "weight updates from shard to shard: %d buckets; the busiest trainer rank sends %.3f GB, the busiest engine "
        "rank receives %.3f GB; %d tensors are loaded by name",
        len(plan.buckets),
        max(plan.sent.values(), default=0) / 1e9,
        max(plan.received.values(), default=0) / 1e9,
        len(reasons),
    )
    for name, reason in sorted(reasons.items()):
        logger.debug("%s is loaded by name: %s", name, reason)
    return plan
