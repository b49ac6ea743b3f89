"""Check where the workers of a recipe are placed at its true number of nodes. Pure.

Input: the settings. Output: a ``Check`` of the driver's own placement against the layout. The
nodes are only counted: neither agents nor Ray run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlpost.config.plan.shape import layout_of
from rlpost.config.tree import Config
from rlpost.errors import PlacementError
from rlpost.orchestration.placement import Offer, Placement, place

if TYPE_CHECKING:
    from rlpost.rehearsal.result import Check


def nodes_check(config: Config) -> Check:
    """Whether each trainer rank and each engine is on the node where the layout has it."""
    from rlpost.rehearsal.result import Check

    per_node, count = config.cluster.num_gpus_per_node, config.num_nodes
    offers = [Offer(f"node {number}", f"node {number}", per_node) for number in range(count)]
    try:
        faults = tuple(placement_problems(config, place(offers, config)))
    except PlacementError as error:
        faults = (str(error),)
    extent = f"{count} nodes, {config.actor_world_size} ranks, {config.num_engines} engines"
    return Check("nodes: each worker on its GPUs", faults, extent)


def placement_problems(config: Config, placement: Placement) -> Iterator[str]:
    """Yield what contradicts the layout.

    Trainer ranks fill nodes in order. Tensor-parallel ranks share a node if they fit on one. An
    engine that shares GPUs has consecutive ranks, each on the node of the engine's part; no GPU is
    used twice otherwise.
    """
    per_node = config.cluster.actor_num_gpus_per_node
    nodes = [slot.node_id for slot in placement.actors]
    if len(nodes) != config.actor_world_size:
        yield f"{len(nodes)} trainer ranks are placed, the layout has {config.actor_world_size}"
        return
    in_order = list(dict.fromkeys(nodes))
    for rank, node in enumerate(nodes):
        wanted = in_order[min(rank // per_node, len(in_order) - 1)]
        if node != wanted:
            yield f"rank {rank} is on {node}, its place is on {wanted}"
    tensor = layout_of(config).tensor
    if tensor <= per_node:
        for first in range(0, len(nodes), tensor):
            if len(of_group := set(nodes[first : first + tensor])) > 1:
                yield (
                    f"the tensor-parallel ranks {first} to {first + tensor - 1} are on "
                    f"{len(of_group)} nodes; they fit on one"
                )
    used = Counter(nodes)
    per_engine = config.cluster.rollout_num_gpus_per_engine
    for number, parts in enumerate(placement.engines):
        shared = [rank for part in parts for rank in part.shared_with]
        first = number * per_engine
        if config.cluster.colocate and shared != list(range(first, first + per_engine)):
            yield f"engine {number} shares the GPUs of ranks {shared}, its own are from {first} on"
        if (gpus := sum(part.num_gpus for part in parts)) != per_engine:
            yield f"engine {number} has {gpus} GPUs, --rollout-num-gpus-per-engine is {per_engine}"
        for part in parts:
            used[part.node_id] += 0 if part.shared_with else part.num_gpus
            for rank in part.shared_with:
                if nodes[rank] != part.node_id:
                    yield f"engine {number} uses the GPU of rank {rank} from another node"
    size = config.cluster.num_gpus_per_node
    for node, gpus in used.items():
        if gpus > size:
            yield f"{gpus} GPUs of {node} are used, --num-gpus-per-node is {size}"
