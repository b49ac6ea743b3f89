"""Exchange boxes of the weights among the trainer's ranks.

Input: the rank's part of a plan with a receiver beside each rank (``rlpost.config.plan.shard_plan``).
Output: for each bucket, the boxes that this rank gets, in a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from rlpost.config.plan.shard_roles import RankPlan
from rlpost.models.regions import Box, Boxes
from rlpost.trainer.weights.shard_sources import ShardSources

WIDTHS = (8, 4, 2, 1)
"""Bytes of an element: a message between trainer ranks is sent in one part for each of them."""


class BoxExchange:
    """This rank's part of an exchange."""

    def __init__(
        self,
        sources: ShardSources,
        plan: RankPlan,
        *,
        rank: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``rank``: of this process in ``group``, whose ranks are those of the plan; None: the world."""
        self.sources, self.plan, self.rank, self.group = sources, plan, rank, group

    def __len__(self) -> int:
        """The number of buckets."""
        return len(self.plan.outgoing)

    @property
    def device(self) -> torch.device:
        return self.sources.inventory.device

    def meet(self) -> None:
        """Create the communicator of the group, which an exchange between some ranks does not do.

        Collective of the group; call it before the first ``exchange``.
        """
        if dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def exchange(self, index: int, buffer: torch.Tensor) -> None:
        """Fill ``buffer``, [num_incoming(index)] uint8, with the boxes of ``incoming``.

        Collective of the group.
        """
        self.transfer(self.pack(index, buffer))
        if index == len(self) - 1:
            self.sources.release()

    def pack(self, index: int, buffer: torch.Tensor) -> list[dist.P2POp]:
        """The messages of a bucket; fills the parts of ``buffer`` that this rank holds itself.

        ``buffer``: [num_incoming(index)] uint8, the boxes one after another. Collective only as far
        as ``ShardSources.prepare`` is.
        """
        self.sources.prepare(self.plan.prepared[index])
        return [*self._sends(index), *self._receives(index, buffer)]

    def transfer(self, operations: list[dist.P2POp]) -> None:
        """Exchange the messages of a bucket. Collective of the group."""
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def incoming(self, index: int) -> Iterator[Box]:
        """The boxes of a bucket: larger elements first, and among them those of lower senders."""
        for _, boxes in self._incoming(index):
            yield from boxes

    def num_incoming(self, index: int) -> int:
        """Bytes of the boxes of a bucket."""
        return sum(self.num_bytes(boxes) for _, boxes in self.plan.incoming[index])

    def largest_incoming(self) -> int:
        """Bytes of the largest bucket."""
        return max(map(self.num_incoming, range(len(self))), default=0)

    def flat(self, boxes: Boxes | Sequence[Box]) -> torch.Tensor:
        """Pack boxes that this rank holds: [num_bytes], uint8."""
        flat = torch.empty(self.num_bytes(boxes), dtype=torch.uint8, device=self.device)
        self._fill(flat, boxes)
        return flat

    def num_bytes(self, boxes: Iterable[Box]) -> int:
        return sum(box.num_elements * self.plan.width(box) for box in boxes)

    def _incoming(self, index: int) -> Iterator[tuple[int, list[Box]]]:
        """The parts of the buffer: sender, and boxes of one element size."""
        for width in WIDTHS:
            for sender, boxes in self.plan.incoming[index]:
                yield sender, [box for box in boxes if self.plan.width(box) == width]

    def _sends(self, index: int) -> Iterator[dist.P2POp]:
        """Messages to other ranks, one for each element size."""
        for width in WIDTHS:
            for receiver, boxes in self.plan.outgoing[index]:
                of_width = [box for box in boxes if self.plan.width(box) == width]
                if of_width and receiver != self.rank:
                    yield self._operation(dist.isend, self.flat(of_width), receiver)

    def _receives(self, index: int, buffer: torch.Tensor) -> Iterator[dist.P2POp]:
        """The same to this rank, into parts of the buffer; fills those that it holds itself."""
        start = 0
        for sender, boxes in self._incoming(index):
            stop = start + self.num_bytes(boxes)
            if sender == self.rank:
                self._fill(buffer[start:stop], boxes)
            elif boxes:
                yield self._operation(dist.irecv, buffer[start:stop], sender)
            start = stop

    def _operation(self, act: Callable[..., object], flat: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(act, flat, group=self.group, group_peer=peer)

    def _fill(self, flat: torch.Tensor, boxes: Iterable[Box]) -> None:
        """Copy boxes into consecutive bytes; larger elements come first, so views are aligned."""
        start = 0
        for box in boxes:
            values = self.sources.read(box)
            stop = start + values.numel() * values.itemsize
            flat[start:stop].view(values.dtype).view(values.shape).copy_(values)
            start = stop
