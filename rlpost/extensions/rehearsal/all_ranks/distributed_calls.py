"""Calls to torch.distributed as one rank issues them. Pure data.

A ``Call`` has everything that must agree between the members of a group, and the line that issued
it. A ``Recording`` is what one rank did in all phases of a rehearsal, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

TRAIN, UPDATE, OFFLOAD = "train", "weight update", "offload"
"""Phases: in the last two a part of the trainer may be offloaded."""
SEND, RECEIVE = "send", "recv"
POINT_TO_POINT = frozenset({SEND, RECEIVE})
SPLIT = "all_to_all"
"""The kind whose sizes differ between the members: each sends its own number of rows to each."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, or one half of a point-to-point transfer.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``send`` and so on.
        group: the ranks of the group, in its order.
        sizes: elements of the tensors that every member must have alike, in order; of
            ``all_to_all`` the elements of a row.
        dtype: torch's name of the elements without the module; empty for objects.
        phase: what the rank does: log-probs, train, weight update.
        line: the line that issued it, as ``file.py:123``.
        root: index in the group of the source or destination; for a transfer the other rank.
        sent: of ``all_to_all``, the rows for each member; empty where all send alike.
        received: of ``all_to_all``, the rows from each member.
        operation: of ``all_reduce``, such as ``SUM``.
    """

    kind: str
    group: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    phase: str = ""
    line: str = ""
    root: int | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    operation: str = ""

    @property
    def agreed(self) -> tuple[object, ...]:
        """The values that must be equal on all members of the group."""
        return self.kind, self.sizes, self.dtype, self.root, self.operation

    @property
    def blocks(self) -> bool:
        """Whether the rank waits here for others: a collective of a group of more than one."""
        return self.kind not in POINT_TO_POINT and len(self.group) > 1

    @property
    def text(self) -> str:
        """The call for a message, without its line."""
        size = " + ".join(map(str, self.sizes)) or "no"
        operation = f" {self.operation}" if self.operation else ""
        root = "" if self.root is None else f", root {self.root}"
        what = f" of {size} {self.dtype} elements" if self.dtype else ""
        return f"{self.kind}{operation}{what}{root}"


@dataclass(frozen=True, slots=True)
class OffloadCycle:
    """Bytes that one cycle moved.

    Attributes:
        leaving: bytes that left the device, by part.
        returning: bytes that returned to it, by part.
        faults: one sentence for each tensor that stayed on the device, or that did not return to
            where it was.
    """

    leaving: Mapping[str, int]
    returning: Mapping[str, int]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """The calls and memory of one rank.

    Attributes:
        rank: of the trainer.
        calls: in the order in which they were issued.
        peaks: largest bytes on the device, by phase.
        held: bytes that stay on the device between phases, by part.
        offload: one cycle of offload and onload; None where the trainer is not offloaded.
    """

    rank: int
    calls: tuple[Call, ...]
    peaks: Mapping[str, int]
    held: Mapping[str, int]
    offload: OffloadCycle | None = None


def translated(
    recording: Recording,
    rank: int,
    groups_of: Mapping[int, Mapping[str, tuple[int, ...]]],
) -> Recording:
    """The recording of ``rank`` if only its place differs from that of the recorded rank.

    Each group becomes the group of the same kind that ``rank`` is in. The position in the group
    changes too, so the other end of a transfer is found by its distance around the group.

    ``groups_of`` has the groups of every rank, by kind.

    Raises:
        ValueError: a call used a group of no known kind, or of two kinds that differ for ``rank``.
    """
    same_kind = _same_kind(groups_of[recording.rank], groups_of[rank])
    calls = []
    for call in recording.calls:
        if call.group not in same_kind:
            raise ValueError(f"{call.line}: the group {call.group} is of no known kind")
        group, root = same_kind[call.group], call.root
        if call.kind in POINT_TO_POINT and root is not None:
            distance = root - call.group.index(recording.rank)
            root = (group.index(rank) + distance) % len(group)
        calls.append(replace(call, group=group, root=root))
    return replace(recording, rank=rank, calls=tuple(calls))


def _same_kind(
    mine: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for kind, group in mine.items():
        if kind not in theirs:
            continue
        if found.setdefault(group, theirs[kind]) != theirs[kind]:
            raise ValueError(f"the group {group} is of several kinds, {kind} among them")
    return found


def by_group(calls: Sequence[Call]) -> dict[tuple[int, ...], list[Call]]:
    """The collectives of a rank by group, without point-to-point transfers and groups of one."""
    found: dict[tuple[int, ...], list[Call]] = {}
    for call in calls:
        if call.blocks:
            found.setdefault(call.group, []).append(call)
    return found
