"""What each rank does in a plan of a weight update (``rlpost.config.plan.shard_plan``). Pure.

Input: a ``ShardPlan``. Output: for each trainer rank and each receiver, its messages by bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from rlpost.config.plan.shard_plan import ShardPlan
from rlpost.models.regions import Box, Boxes

BoxesByRank = tuple[tuple[int, Boxes], ...]
"""Of a bucket: for each other rank, the boxes of the message from or to it."""


@dataclass(frozen=True)
class RankPlan:
    """The part of a trainer rank in a plan, by bucket."""

    outgoing: tuple[BoxesByRank, ...]
    """What it sends to each receiver."""
    incoming: tuple[BoxesByRank, ...]
    """What it receives from each sender for the engine rank on its device; empty without one."""
    prepared: tuple[tuple[str, ...], ...]
    """The tensors of the bucket that it sends, or helps to gather, in an order common to all."""
    element_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of each tensor that it sends or receives."""

    def width(self, box: Box) -> int:
        return self.element_bytes[box.tensor]


def rank_plans(plan: ShardPlan, gathered: Sequence[Set[str]]) -> list[RankPlan]:
    """The parts of the trainer's ranks, which help to gather the tensors in ``gathered``."""
    num_ranks = len(gathered)
    outgoing: list[list[BoxesByRank]] = [[] for _ in range(num_ranks)]
    incoming: list[list[BoxesByRank]] = [[] for _ in range(num_ranks)]
    prepared: list[list[tuple[str, ...]]] = [[] for _ in range(num_ranks)]
    for bucket, order in zip(plan.buckets, plan.tensors, strict=True):
        sent: list[list[tuple[int, Boxes]]] = [[] for _ in range(num_ranks)]
        received: list[list[tuple[int, Boxes]]] = [[] for _ in range(num_ranks)]
        names_by_rank = [set(names) for names in gathered]
        for one in bucket:
            sent[one.sender].append((plan.rank_of(one.receiver), one.boxes))
            names_by_rank[one.sender].update(*(group.tensors for group in one.boxes.groups))
            if one.receiver in plan.beside:
                received[plan.beside[one.receiver]].append((one.sender, one.boxes))
        for rank in range(num_ranks):
            outgoing[rank].append(tuple(sent[rank]))
            incoming[rank].append(tuple(received[rank]))
            prepared[rank].append(tuple(filter(names_by_rank[rank].__contains__, order)))
    plans = []
    for sent_by, received_by, names in zip(outgoing, incoming, prepared, strict=True):
        widths = _widths(plan, itertools.chain(*sent_by, *received_by))
        plans.append(RankPlan(tuple(sent_by), tuple(received_by), tuple(names), widths))
    return plans


def _widths(plan: ShardPlan, messages: Iterable[tuple[int, Boxes]]) -> dict[str, int]:
    """Bytes of an element of each tensor in these messages."""
    groups = (group for _, boxes in messages for group in boxes.groups)
    names = {name for group in groups for name in group.tensors}
    return {name: plan.element_bytes[name] for name in names}


def receiver_plans(plan: ShardPlan, num_receivers: int) -> list[list[BoxesByRank]]:
    """For each receiver and bucket, the boxes that it gets from each sender.

    With a trainer rank beside the receiver, that rank hands over all boxes of a bucket in one
    message, which may be empty: those of larger elements first, among them those of lower senders.
    """
    plans: list[list[BoxesByRank]] = [[] for _ in range(num_receivers)]
    for bucket in plan.buckets:
        received: list[list[tuple[int, Boxes]]] = [[] for _ in range(num_receivers)]
        for one in bucket:
            received[one.receiver].append((one.sender, one.boxes))
        for receiver, messages in enumerate(received):
            if receiver in plan.beside:
                groups = [group for _, boxes in messages for group in boxes.groups]
                groups.sort(key=lambda group: -plan.element_bytes[group.tensors[0]])  # stable
                messages = [(plan.beside[receiver], Boxes(tuple(groups)))]
            plans[receiver].append(tuple(messages))
    return plans
