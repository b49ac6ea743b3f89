"""Check where the workers of a recipe are placed at its true number of nodes.

Input: the settings. Output: a ``RehearsalCheck`` of the driver's own placement against the layout. Either
the nodes are only counted (``nodes_check``, pure), or the agents of a job meet first, in another
process on this machine (``agents_check``), and the cluster is the one that they hand to the driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.cluster import Cluster
from common.units import counted
from rlpost.config.plan.shape import layout_of
from rlpost.config.tree import Config
from rlpost.driver.placement import Offer, Placement, place, ports_of_run
from rlpost.errors import PlacementError

if TYPE_CHECKING:
    from rlpost.rehearsal.result import RehearsalCheck

AGENTS_S = 60.0
"""Deadline for all agents to meet and for Ray to start. On two cores 1,024 nodes take 6 s."""
_END_S = 60.0  # the head waits at most 30 s for the ends of nodes
_ROOT = Path(__file__).parents[2]


def nodes_check(config: Config) -> RehearsalCheck:
    """Whether each trainer rank and each engine is on the node where the layout has it."""
    from rlpost.rehearsal.result import RehearsalCheck

    per_node, count = config.cluster.num_gpus_per_node, config.num_nodes
    offers = [Offer(f"node {number}", f"node {number}", per_node) for number in range(count)]
    try:
        faults = tuple(placement_problems(config, place(offers, config)))
    except PlacementError as error:
        faults = (str(error),)
    extent = f"{counted(count, 'node')}, {_workers(config)}"
    return RehearsalCheck("nodes: each worker on its GPUs", faults, extent)


@dataclass(frozen=True, slots=True)
class Agents:
    """The result of a bring-up with ``bootstrap.simulated``.

    Attributes:
        cluster: what the driver received; None if the bring-up failed.
        cause: why it failed.
        seconds: from the start of the head to the end of all nodes.
    """

    cluster: Cluster | None
    cause: str
    seconds: float


def agents_check(
    config: Config, *, deadline_s: float = AGENTS_S, absent: Sequence[str] = ()
) -> RehearsalCheck:
    """Whether the agents of all nodes meet, and each worker is on its GPUs of their cluster.

    Args:
        config: the settings.
        deadline_s: seconds in which the agents must meet.
        absent: hosts (``s0001``) whose agent does not start.
    """
    from rlpost.rehearsal.result import RehearsalCheck

    agents = _bring_up_agents(config, deadline_s, absent)
    faults = tuple(agents_problems(config, agents))
    extent = f"{counted(config.num_nodes, 'node')} in {agents.seconds:.1f} s, {_workers(config)}"
    return RehearsalCheck("agents: every node joins, each worker on its GPUs", faults, extent)


def agents_problems(config: Config, agents: Agents) -> Iterator[str]:
    """Yield why there is no cluster, or what in it contradicts the layout. Pure."""
    cluster = agents.cluster
    if cluster is None:
        yield agents.cause
        return
    if len(cluster.nodes) != config.num_nodes:
        yield f"{counted(len(cluster.nodes), 'node')} joined, the run has {config.num_nodes}"
    offers = [Offer(node.host, node.ip, node.num_gpus) for node in cluster.nodes]
    try:
        placement = place(offers, config)
        ports_of_run(config, placement, base=cluster.port_base, count=cluster.port_count)
    except PlacementError as error:
        yield str(error)
        return
    yield from placement_problems(config, placement)


def _bring_up_agents(config: Config, deadline_s: float, absent: Collection[str]) -> Agents:
    """Bring up the agents in another process and read the result."""
    with tempfile.TemporaryDirectory(prefix="rlpost-agents-") as folder:
        size = (str(config.num_nodes), str(config.cluster.num_gpus_per_node))
        command = [sys.executable, "-m", "bootstrap.simulated", *size, folder]
        command += [f"--deadline-s={deadline_s}", *(f"--absent={host}" for host in absent)]
        path = ":".join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
        within_s = deadline_s + _END_S
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=within_s,
                env={**os.environ, "PYTHONPATH": path},
            )
        except subprocess.TimeoutExpired:
            return Agents(None, f"the agents did not end within {within_s:.0f} s", within_s)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-8:])
        return Agents(None, f"the agents ended with code {done.returncode}:\n{last}", 0.0)
    told = json.loads(done.stdout.splitlines()[-1])
    cluster = Cluster.from_json(told["cluster"]) if told["cluster"] else None
    return Agents(cluster, told["cause"], told["seconds"])


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
            if len(of_group := set(nodes[first : first + tensor])) > 1:
                yield (
                    f"the tensor-parallel ranks {first} to {first + tensor - 1} are on "
                    f"{counted(len(of_group), 'node')}; they fit on one"
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
