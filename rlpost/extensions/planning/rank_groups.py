"""The trainer's parallel groups, and those that may cross a block of the network. Pure.

Input: the layout, GPUs per node, and the nodes of a segment (Slurm's ``--segment``). Output: the
ranks of each group, and per kind of parallelism the number of groups that leave their segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.config.plan.shape import Layout
from rlpost.config.tree import Config


@dataclass(frozen=True, slots=True)
class Crossing:
    """The groups of one kind of parallelism, and how many of them leave their segment."""

    name: str
    num_groups: int
    num_crossing: int


def parallel_groups(layout: Layout) -> dict[str, list[range]]:
    """Return the ranks of each group by kind, the groups in order of their first rank.

    The order of ranks is Megatron-core's default, ``tp-cp-ep-dp-pp`` of
    ``parallel_state.initialize_model_parallel``: tensor-parallel ranks are adjacent, and stages are
    farthest apart. The expert layers have a separate order without context parallelism.
    """
    expert_data = layout.world // (layout.expert_tensor * layout.expert * layout.pipeline)
    attention = (layout.tensor, layout.context, layout.data, layout.pipeline)
    experts = (layout.expert_tensor, layout.expert, expert_data, layout.pipeline)
    return {
        "tensor": _groups_along(attention, 0),
        "context": _groups_along(attention, 1),
        "expert": _groups_along(experts, 1),
        "data": _groups_along(attention, 2),
        "pipeline": _groups_along(attention, 3),
    }


def crossings(layout: Layout, gpus_per_node: int, segment: int) -> tuple[Crossing, ...]:
    """Count the groups that leave a segment of ``segment`` nodes, for sizes above 1.

    Ranks fill nodes in order, and the nodes of a segment are adjacent. Slurm places each segment
    within one block, so a group inside a segment never crosses a block; another one crosses unless
    both segments are in the same block.
    """
    ranks = gpus_per_node * segment
    found = []
    for name, groups in parallel_groups(layout).items():
        if len(groups[0]) > 1:
            # The ranks of a group ascend, so its ends are in different segments if any two are.
            crossing = [group for group in groups if group[0] // ranks != group[-1] // ranks]
            found.append(Crossing(name, len(groups), len(crossing)))
    return tuple(found)


def planned_crossings(config: Config, layout: Layout) -> tuple[Crossing, ...]:
    """Return the crossings of a run with ``--segment``; nothing without."""
    cluster = config.cluster
    if cluster.segment is None:
        return ()
    return crossings(layout, cluster.actor_num_gpus_per_node, cluster.segment)


def crossing_words(found: Sequence[Crossing]) -> str:
    """Name the kinds of groups that may cross a block with their number, then the other kinds."""
    across = [
        f"{kind.num_crossing} of {kind.num_groups} {kind.name}"
        for kind in found
        if kind.num_crossing
    ]
    within = [kind.name for kind in found if not kind.num_crossing]
    words = f"groups that may cross: {', '.join(across) or 'none'}"
    return f"{words}; within one: {', '.join(within)}" if within else words


def _groups_along(sizes: Sequence[int], axis: int) -> list[range]:
    """Return the ranks that differ in one dimension only; the first of ``sizes`` varies fastest."""
    stride, size = math.prod(sizes[:axis]), sizes[axis]
    firsts = (rank for rank in range(math.prod(sizes)) if rank // stride % size == 0)
    return [range(first, first + size * stride, stride) for first in firsts]
