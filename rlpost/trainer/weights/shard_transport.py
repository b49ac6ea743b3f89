"""Trainer side of a weight update from shard to shard: send boxes of this rank's weights.

Input: the rank's part of the plan (``rlpost.config.plan.shard_plan``). Output: for each bucket, one
flat message to each engine rank that needs something of this rank, over one of two transports.

- ``send``: engines on other GPUs. All trainer ranks and all engine ranks form one process group.
- ``share``: engines on the trainer's GPUs. The trainer rank on the GPU of an engine rank receives
  for it from the other trainer ranks, and returns a handle to the bytes, as ``Sharing`` does.

The bytes of a message are defined by ``rlpost.models.regions``. While the engines load a bucket,
the next one is packed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta

import torch

from rlpost.config.plan.shard_plan import Unit
from rlpost.config.plan.shard_roles import RankPlan
from rlpost.errors import SyncError
from rlpost.models.regions import BoxGroup, grouped
from rlpost.trainer.weights.box_exchange import BoxExchange
from rlpost.trainer.weights.engine_group import EngineGroup, Sender, TrainerRank
from rlpost.trainer.weights.shard_sources import ShardSources
from rlpost.trainer.weights.trainer_side import SharedBuffers

Description = tuple[tuple[Unit, ...], list[BoxGroup], frozenset[str]]
"""Of a rank: the units of the model, its boxes, the tensors that it helps to gather."""
Packed = dict[int, torch.Tensor]


class ShardTransport(Sender):
    """Sends this rank's boxes. All methods but ``abort`` are collective: call on every rank."""

    def __init__(
        self,
        sources: ShardSources,
        *,
        rank: TrainerRank,
        backend: str,
        timeout_s: float,
        secret: str | None,
    ) -> None:
        """Create an unconnected sender.

        ``timeout_s`` is the deadline of each bucket.
        """
        super().__init__(backend=backend, timeout_s=timeout_s, secret=secret)
        self.sources, self.rank = sources, rank
        self._boxes = BoxExchange(sources, RankPlan((), (), ()), rank=rank.rank)
        self.buffers = SharedBuffers()
        self._packed: Packed = {}
        """Messages of the next bucket by the rank of the receiver."""

    def list_units(self) -> tuple[Unit, ...]:
        """All tensors that are sent; none on ranks other than the first."""
        return self.sources.units if self.rank.rank == 0 else ()

    def describe(self) -> Description:
        """What this rank holds; only the first rank lists the units of the model."""
        return self.list_units(), grouped(self.sources.regions), self.sources.gathered

    def use(self, plan: RankPlan) -> None:
        """Send by this plan from the next bucket 0 on."""
        self._boxes = BoxExchange(self.sources, plan, rank=self.rank.rank)
        self._packed = {}

    def connect(
        self, host: str, port: int, num_engine_ranks: int, name: str, join_s: float
    ) -> None:
        """Form the process group with the engines; the first trainer rank listens on the address.

        No engine is in a collective that only the trainer can end before ``meet`` is called.

        Raises:
            SyncError: a rank did not join within ``join_s`` seconds, or ``abort`` was called.
        """
        if self.group is not None:
            raise SyncError(f"already connected to engines; disconnect before connecting {name!r}")
        join = timedelta(seconds=join_s)
        self.group = EngineGroup.form(
            (host, port),
            name=name,
            num_engine_ranks=num_engine_ranks,
            backend=self.backend,
            timeout=self.timeout,
            join=join,
            secret=self.secret,
            cancelled=self._cancelled,
            trainer=self.rank,
            joined_as=name,
        )

    def meet(self, join_s: float) -> None:
        """Open the connections of the group, within ``join_s`` seconds.

        Raises:
            SyncError: an engine did not take part in time, or ``abort`` was called.
        """
        if self.group is None:
            raise SyncError("no engine is connected; call connect before meet")
        self.group.meet(self.sources.inventory.device, within=timedelta(seconds=join_s))

    def pack(self, index: int) -> None:
        """Pack bucket ``index``, with no engine involved: the engines load the one before."""
        self._packed = {}  # free it before the next is packed
        plan = self._boxes.plan
        self.sources.prepare(plan.prepared[index])
        self._packed = {
            self.rank.count + receiver: self._boxes.flat(boxes)
            for receiver, boxes in plan.outgoing[index]
        }

    def send(self, index: int) -> None:
        """Send bucket ``index``, which is packed.

        Raises:
            SyncError: an engine did not take part in time, or ``abort`` was called.
        """
        if self.group is None:
            raise SyncError("no engine is connected; call connect before send")
        packed, self._packed = self._packed, {}
        try:
            self.group.send_messages(packed)
        except SyncError as error:
            size = sum(flat.numel() for flat in packed.values())
            raise SyncError(
                f"bucket {index + 1} of {len(self._boxes)} ({size} bytes of rank {self.rank.rank}) did not "
                f"reach all engines: {error}"
            ) from error
        finally:
            if index + 1 == len(self._boxes):
                self.sources.release()

    def share(self, index: int, message: Mapping[str, object]) -> str:
        """Exchange bucket ``index`` among the trainer's ranks; return a handle for the engine rank.

        The handle is that of ``message`` with the bytes of the bucket, the boxes of larger elements
        first and among them those of lower senders. It is valid for one reader, until the second
        call after this one.
        """
        device = self.sources.inventory.device
        if index == 0:
            self._boxes.meet()
        size = self._boxes.num_incoming(index)
        buffer = self.buffers.piece(index, size, self.largest_shared_bytes(), device)
        self._boxes.exchange(index, buffer)
        if not len(buffer):  # CUDA has no handle to no memory
            buffer = torch.empty(0, dtype=torch.uint8)
        return self.buffers.handle([(json.dumps(dict(message)), buffer)], device)

    def disconnect(self) -> None:
        super().disconnect()
        self._packed = {}

    def release(self) -> None:
        """Free all memory, once every engine has responded or its process has ended."""
        self.buffers.release()
        self.sources.release()
        self._packed = {}

    def largest_shared_bytes(self) -> int:
        """Bytes of the largest bucket of the engine rank on this GPU."""
        return self._boxes.largest_incoming()
