"""Assign tensors and files to ranks, and plan how each rank gets the missing parts of them. Pure.

Input: what each rank holds of the tensors (``rlpost.models.regions``). Output: the rank of each
tensor that is hashed and of each file that is written; a ``ShardPlan`` whose receivers need whole
tensors. No rank gets a tensor that another rank hashes or writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlpost.config.plan.shard_plan import ShardPlan, Unit, plan_shards
from rlpost.models.regions import BoxGroup, Index


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor or file, and the ranks that may get it."""

    num_bytes: int
    ranks: tuple[int, ...]
    holders: tuple[int, ...] = ()
    """Those of ``ranks`` that hold most of it."""


def assign(items: Sequence[Item]) -> list[int]:
    """Return the rank of each item.

    A holder gets the item unless it would exceed the mean of the ranks. What is left goes to the
    rank with the fewest bytes, of several the first. So no rank exceeds the mean of those with the
    same choice by more than an item.
    """
    choices: dict[tuple[int, ...], list[int]] = {}
    for at, item in enumerate(items):
        choices.setdefault(item.ranks, []).append(at)
    loads: Counter[int] = Counter()
    assigned = [0] * len(items)

    def give(at: int, rank: int) -> None:
        loads[rank] += items[at].num_bytes
        assigned[at] = rank

    # Items that any rank may get fill the gaps of those that few may get.
    for ranks in sorted(choices, key=len):
        largest_first = sorted(choices[ranks], key=lambda at: -items[at].num_bytes)
        mean = sum(items[at].num_bytes for at in largest_first) / len(ranks)
        left = []
        for at in largest_first:
            holder = min(items[at].holders or ranks, key=loads.__getitem__)
            if loads[holder] + items[at].num_bytes <= mean:
                give(at, holder)
            else:
                left.append(at)
        for at in left:
            give(at, min(ranks, key=loads.__getitem__))
    return assigned


def largest_holders(sources: Sequence[Sequence[BoxGroup]]) -> dict[str, tuple[int, ...]]:
    """For each tensor, the indices of the sources that hold most elements of it."""
    held: dict[str, Counter[int]] = {}
    for index, groups in enumerate(sources):
        for group in groups:
            elements = group.num_elements // len(group.tensors)
            for name in group.tensors:
                held.setdefault(name, Counter())[index] += elements
    holders: dict[str, tuple[int, ...]] = {}
    for name, counts in held.items():
        most = max(counts.values())
        holders[name] = tuple(index for index, count in counts.items() if count == most)
    return holders


def whole_plan(
    units: Sequence[Unit],
    sources: Sequence[Sequence[BoxGroup]],
    receivers: Mapping[str, int],
    *,
    max_bytes: int,
) -> ShardPlan:
    """Plan that each tensor reaches the rank in ``receivers``, an index of ``sources``, as a whole.

    ``receivers`` has all tensors of the sources; other units are left out. What a receiver holds
    itself crosses no network. All receivers get their tensors at the same pace, each in the order
    of ``units``.

    Raises:
        WeightError: as ``plan_shards``.
    """
    travelling: list[Unit] = []
    shapes: list[dict[Index, list[str]]] = [{} for _ in sources]
    for unit in units:
        for tensor in unit.tensors:
            if (receiver := receivers.get(tensor.name)) is not None:
                travelling.append(Unit(receiver, (tensor,), is_divisible=unit.is_divisible))
                shapes[receiver].setdefault(tensor.shape, []).append(tensor.name)
    sinks = []
    for rank_shapes in shapes:
        wholes = rank_shapes.items()
        sinks.append([BoxGroup(tuple(names), (0,) * len(shape), shape) for shape, names in wholes])
    beside = {rank: rank for rank in range(len(sources))}
    return plan_shards(
        travelling, sources, sinks, max_bytes=max_bytes, beside=beside, receiver="receiving rank"
    )
