"""Assign what ranks need to the ranks that hold it, so that all of these send alike. Pure.

Input: the pieces of a bucket (``rlpost.config.plan.shard_plan``), whose boxes one or several senders
hold. Output: the messages. Pieces of tensors of one kind are assigned together.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlpost.models.regions import Box, Boxes, BoxGroup, Message, in_parts

FINEST = 64
"""Boxes larger than 1 / FINEST of what an average sender sends in a bucket are divided among the
ranks that hold them."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of a tensor that any of ``senders`` can send to each of ``receivers``."""

    box: Box
    element_bytes: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.element_bytes

    def of(self, tensors: tuple[str, ...]) -> BoxGroup:
        """The same box of tensors of the kind."""
        return BoxGroup(tensors, self.box.start, self.box.size)

    def divided(self, tensors: tuple[str, ...], grain: int) -> Iterator[tuple[BoxGroup, int]]:
        """That of all tensors, in parts of about ``grain`` bytes, with the bytes of each.

        In at most as many parts of a box as senders.
        """
        count = min(len(self.senders), -(-self.num_bytes // grain))
        for box in [self.box] if count <= 1 else in_parts(self.box, count):
            size = box.num_elements * self.element_bytes
            step = max(1, grain // size)
            for first in range(0, len(tensors), step):
                some = tensors[first : first + step]
                yield BoxGroup(some, box.start, box.size), len(some) * size


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of units, or a part of its tensors' boxes that fits into a bucket."""

    transfers: tuple[tuple[int, Transfer], ...]
    """Of the tensors of a unit, by their index in it."""
    received: Counter[int]
    """Bytes by receiver."""
    total: int
    """Bytes of all receivers."""

    @staticmethod
    def of(transfers: Iterable[tuple[int, Transfer]]) -> Part:
        """With the bytes of these transfers."""
        kept, received = tuple(transfers), Counter[int]()
        for _, transfer in kept:
            size = transfer.num_bytes
            for receiver in transfer.receivers:
                received[receiver] += size
        return Part(kept, received, received.total())


@dataclass(frozen=True, slots=True)
class Piece:
    """What of a unit goes into one bucket."""

    stage: int
    tensors: tuple[str, ...]
    part: Part


def _together(pieces: Sequence[Piece]) -> Iterator[tuple[Transfer, tuple[str, ...]]]:
    """The transfers of a bucket, with all tensors of one kind in one transfer."""
    alike: dict[int, list[Piece]] = {}
    for piece in pieces:
        alike.setdefault(id(piece.part), []).append(piece)
    for of_kind in alike.values():
        names = list(zip(*(piece.tensors for piece in of_kind), strict=True))
        for index, transfer in of_kind[0].part.transfers:
            yield transfer, names[index]


@dataclass(slots=True)
class _Assigned:
    """What a sender sends to a receiver in a bucket."""

    groups: list[tuple[int, BoxGroup]] = field(default_factory=list)
    """With the negative size of their elements: larger elements come first."""
    num_bytes: int = 0

    def add(self, group: BoxGroup, num_bytes: int, element_bytes: int) -> None:
        self.groups.append((-element_bytes, group))
        self.num_bytes += num_bytes

    @property
    def boxes(self) -> Boxes:
        in_order = sorted(self.groups, key=operator.itemgetter(0))  # stable
        return Boxes(tuple(group for _, group in in_order))


class Balance:
    """Chooses senders so that the bytes of all of them grow alike."""

    def __init__(self, num_senders: int, max_bytes: int, beside: Mapping[int, int]) -> None:
        self.loads = [0] * num_senders
        self.max_bytes, self.beside = max_bytes, beside

    def assign(self, pieces: Sequence[Piece]) -> list[tuple[Message, ...]]:
        """The messages of a bucket; of several if a sender would send more than a bucket."""
        before = list(self.loads)
        assigned = self._assigned(list(_together(pieces)))
        sent: Counter[int] = Counter()
        for (sender, _), part in assigned.items():
            sent[sender] += part.num_bytes
        if len(pieces) > 1 and max(sent.values()) > self.max_bytes:
            self.loads, middle = before, len(pieces) // 2
            return self.assign(pieces[:middle]) + self.assign(pieces[middle:])
        messages = []
        for sender, receiver in sorted(assigned):
            messages.append(Message(sender, receiver, assigned[sender, receiver].boxes))
        return [tuple(messages)]

    def _assigned(
        self, transfers: Sequence[tuple[Transfer, tuple[str, ...]]]
    ) -> dict[tuple[int, int], _Assigned]:
        total = sum(one.num_bytes * len(tensors) * len(one.receivers) for one, tensors in transfers)
        grain = max(1, total // len(self.loads) // FINEST)
        assigned: dict[tuple[int, int], _Assigned] = defaultdict(_Assigned)
        # Those that few ranks hold come first, the others fill up what these leave.
        for transfer, tensors in sorted(transfers, key=lambda each: len(each[0].senders)):
            self._assign_one(transfer, tensors, grain, assigned)
        return assigned

    def _assign_one(
        self,
        transfer: Transfer,
        tensors: tuple[str, ...],
        grain: int,
        assigned: dict[tuple[int, int], _Assigned],
    ) -> None:
        """Divide a transfer among its senders, for one receiver after another."""
        senders, width = set(transfer.senders), transfer.element_bytes
        whole, size = transfer.of(tensors), transfer.num_bytes * len(tensors)
        parts = [(whole, size)] if len(senders) == 1 else list(transfer.divided(tensors, grain))
        # A heap of (bytes, sender): thousands of ranks hold what thousands need.
        loads = [(self.loads[sender], sender) for sender in transfer.senders]
        heapq.heapify(loads)
        for receiver in transfer.receivers:
            local = self.beside.get(receiver)
            if local in senders:
                assigned[local, receiver].add(whole, size, width)
                continue
            for part, part_size in parts:
                load, sender = loads[0]
                heapq.heapreplace(loads, (load + part_size, sender))
                assigned[sender, receiver].add(part, part_size, width)
        for load, sender in loads:
            self.loads[sender] = load
