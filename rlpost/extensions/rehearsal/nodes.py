"""Check where the workers of a recipe are placed at its true number of nodes.

Input: the settings. Output: a ``RehearsalCheck`` of the driver's own placement against the layout. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.units import counted
from rlpost.config.plan.shape import layout_of
from rlpost.config.tree import Config
from rlpost.driver.placement import Offer, Placement, place
from rlpost.errors import PlacementError

if TYPE_CHECKING:
    from rlpost.extensions.rehearsal.all_ranks.result import RehearsalCheck


def nodes_check(config: Config) -> RehearsalCheck:
    """Whether each trainer rank and each engine is on the node where the layout has it."""
    from rlpost.extensions.rehearsal.all_ranks.result import RehearsalCheck

    per_node, count = config.cluster.num_gpus_per_node, config.num_nodes
    offers = [Offer(f"node {number}", f"node {number}", per_node) for number in range(count)]
    try:
        faults = tuple(placement_problems(config, place(offers, config)))
    except PlacementError as error:
        faults = (str(error),)
    extent = f"{counted(count, 'node')}, {_workers(config)}"
    return RehearsalCheck("nodes: each worker on its GPUs", faults, extent)


def _workers(config: Config) -> str:
    num_engines = config.num_engines + sum(
        group.num_placed for group in config.engines.started.values()
    )
    return f"{counted(config.actor_world_size, 'rank')}, {counted(num_engines, 'engine')}"


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
        expected = in_order[min(rank // per_node, len(in_order) - 1)]
        if node != expected:
            yield f"rank {rank} is on {node}, its place is on {expected}"
    tensor = layout_of(config).tensor
    if tensor <= per_node:
        for first in range(0, len(nodes), tensor):
            if len(group_nodes := set(nodes[first : first + tensor])) > 1:
                yield (
                    f"the tensor-parallel ranks {first} to {first + tensor - 1} are on "
                    f"{counted(len(group_nodes), 'node')}; they fit on one"
                )
    used = Counter(nodes)
    per_engine = config.cluster.rollout_num_gpus_per_engine
    for number, parts in enumerate(placement.engines):
        shared = [rank for part in parts for rank in part.shared_with]
        first = number * per_engine
        if config.cluster.colocate and shared != list(range(first, first + per_engine)):
            yield f"engine {number} shares the GPUs of ranks {shared}, its own are from {first} on"
        if (gpus := sum(part.num_gpus for part in parts)) != per_engine:
            yield f"engine {number} has {counted(gpus, 'GPU')}, --rollout-num-gpus-per-engine is {per_engine}"
        for part in parts:
            used[part.node_id] += 0 if part.shared_with else part.num_gpus
            for rank in part.shared_with:
                if nodes[rank] != part.node_id:
                    yield f"engine {number} uses the GPU of rank {rank} from another node"
    size = config.cluster.num_gpus_per_node
    for name, group in config.engines.started.items():
        engines = placement.groups[name]
        sizes = [sum(part.num_gpus for part in slots) for slots in engines]
        if sizes != [group.gpus_per_engine(size)] * group.num_placed:
            yield f"the engines of {name} have {sizes} GPUs, [engines.{name}] says otherwise"
        for slots in engines:
            used.update({slot.node_id: slot.num_gpus for slot in slots})
    for node, gpus in used.items():
        if gpus > size:
            yield f"{counted(gpus, 'GPU')} of {node} are used, --num-gpus-per-node is {size}"
