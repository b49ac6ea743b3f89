"""The coordinates of a rank in a layout, and the members of its groups. Pure arithmetic.

Ranks count tensor-parallel first, then context, data and pipeline. The ranks of one pipeline stage
count a second time for the experts: expert-tensor first, then expert, then data.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.config.plan.shape import Layout

KINDS = {
    "tensor": ("tensor",),
    "context": ("context",),
    "data": ("data",),
    "data_with_context": ("context", "data"),
    "pipeline": ("pipeline",),
    "model": ("tensor", "pipeline"),
    "expert_tensor": ("expert_tensor",),
    "expert": ("expert",),
    "expert_data": ("expert_data",),
}
"""The kinds of groups, each with the coordinates in which its members differ."""
DENSE = ("tensor", "context", "data", "pipeline")
EXPERT = ("expert_tensor", "expert", "expert_data", "pipeline")


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """The coordinates of a rank; each name is a kind of parallelism."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


def place(layout: Layout, rank: int) -> RankCoordinates:
    """The coordinates of a rank of the layout."""
    stage, within = divmod(rank, layout.world // layout.pipeline)
    rest, tensor = divmod(within, layout.tensor)
    data, context = divmod(rest, layout.context)
    rest, expert_tensor = divmod(within, layout.expert_tensor)
    expert_data, expert = divmod(rest, layout.expert)
    return RankCoordinates(tensor, context, data, stage, expert_tensor, expert, expert_data)


def members(layout: Layout, kind: str) -> dict[int, tuple[int, ...]]:
    """For each rank the ranks of its group of this kind, itself included, in ascending order."""
    differing = KINDS[kind]
    coordinates = EXPERT if kind.startswith("expert") else DENSE
    fixed = [name for name in coordinates if name not in differing]
    groups: dict[tuple[int, ...], list[int]] = {}
    group_of: dict[int, tuple[int, ...]] = {}
    for rank in range(layout.world):
        where = place(layout, rank)
        group_of[rank] = tuple(getattr(where, name) for name in fixed)
        groups.setdefault(group_of[rank], []).append(rank)
    return {rank: tuple(groups[group_of[rank]]) for rank in range(layout.world)}
