"""Placement of trainer ranks and engines on nodes, and the ports of their services. Pure.

Input: the resources of each node and the settings. Output: one slot for each trainer rank and each engine, and the
ports of the run's services. Equal nodes in equal order always give the same placement.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlpost.config.tree import Config
from rlpost.errors import PlacementError

SHARED_PORTS = 3
DERIVED_PORTS = 7
"""With data-parallel attention SGLang's processes talk over TCP, on the ports behind the one where ranks meet
(``PortArgs.init_new``: six, and a spare)."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A node that is up: Ray's id for it, its address and its free GPUs."""

    node_id: str
    ip: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one worker of ``num_gpus`` GPUs: its own, or those of the trainer ranks that it shares them with."""

    node_id: str
    ip: str
    num_gpus: int
    shared_with: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """``actors[rank]``, and for each engine its parts, one a node; the first of them answers requests."""

    actors: tuple[Slot, ...]
    engines: tuple[tuple[Slot, ...], ...]

    @property
    def ranks_of_engines(self) -> tuple[tuple[int, ...], ...]:
        """The trainer ranks on each engine's GPUs, in the order of its own ranks; empty where they are its own."""
        return tuple(tuple(rank for part in parts for rank in part.shared_with) for parts in self.engines)


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of the run's services, all from the job's own block. Engines on different nodes may share numbers."""

    engines: tuple[int, ...]
    engine_groups: tuple[int, ...]  # where the ranks inside one engine meet; what SGLang derives from it follows
    router: int
    router_metrics: int
    actor_group: int  # where the trainer's ranks meet
    sync_groups: tuple[int, ...]  # where each pipeline stage of the trainer meets the engines


def place(offers: Sequence[Offer], config: Config) -> Placement:
    """Trainer ranks fill the first nodes in order. Engines share their GPUs (``--colocate``), or each goes to the node
    with the most GPUs left; one that is larger than a node takes whole ones.

    Raises PlacementError with a table of what each node offers when something does not fit.
    """
    per_node = config.cluster.actor_num_gpus_per_node
    free = [offer.num_gpus for offer in offers]
    able = [index for index, gpus in enumerate(free) if gpus >= per_node][: config.actor_num_nodes]
    if len(able) < config.actor_num_nodes:
        raise PlacementError(_missing(f"{config.actor_num_nodes} nodes with {per_node} GPUs to train", offers))
    actors = []
    for index in able:
        free[index] -= per_node
        actors += [Slot(offers[index].node_id, offers[index].ip, 1)] * per_node
    per_engine = config.cluster.rollout_num_gpus_per_engine
    if config.cluster.colocate:
        return Placement(tuple(actors), tuple(_beside(actors, per_engine)))
    engines = []
    for _ in range(config.num_engines):
        parts = _part_sizes(per_engine, config.cluster.num_gpus_per_node)
        chosen = sorted(range(len(free)), key=lambda i: (-free[i], i))[: len(parts)]
        if len(chosen) < len(parts) or any(free[i] < size for i, size in zip(chosen, parts, strict=True)):
            wanted = f"{config.num_engines} engines of {per_engine} GPUs beside {len(actors)} trainer ranks"
            raise PlacementError(_missing(wanted, offers))
        for index, size in zip(chosen, parts, strict=True):
            free[index] -= size
        engines.append(
            tuple(Slot(offers[i].node_id, offers[i].ip, size) for i, size in zip(sorted(chosen), parts, strict=True))
        )
    return Placement(tuple(actors), tuple(engines))


def order_by_gpu(actors: Sequence[Slot], positions: Sequence[int | None]) -> tuple[int, ...]:
    """Which worker is which rank: ``workers[order[rank]]`` has the GPU that comes next on the rank's node.

    Workers never change nodes, so slots stay as they are. Neighbours in rank are then neighbours in the node's
    topology: traffic of tensor parallelism stays beside its switch, and each rank's collectives on its rail.

    Args:
        positions: of each worker's GPU among those of its node. Where a worker of a node does not know its own, or two
            have the same, the order on that node stays.
    """
    order = list(range(len(actors)))
    for node in dict.fromkeys(slot.node_id for slot in actors):
        ranks = [rank for rank, slot in enumerate(actors) if slot.node_id == node]
        known = {positions[rank] for rank in ranks} - {None}
        if len(known) == len(ranks):
            by_gpu = sorted(ranks, key=lambda rank: positions[rank] or 0)
            for rank, worker in zip(ranks, by_gpu, strict=True):
                order[rank] = worker
    return tuple(order)


def _part_sizes(per_engine: int, per_node: int) -> list[int]:
    """GPUs of an engine on each of its nodes."""
    return [per_engine] if per_engine <= per_node else [per_node] * (per_engine // per_node)


def _beside(actors: Sequence[Slot], per_engine: int) -> Iterator[tuple[Slot, ...]]:
    """Engines on the GPUs of the trainer's ranks, in their order."""
    for first in range(0, len(actors), per_engine):
        ranks = range(first, first + per_engine)
        nodes = list(dict.fromkeys((actors[rank].node_id, actors[rank].ip) for rank in ranks))
        shared = [tuple(rank for rank in ranks if actors[rank].node_id == node) for node, _ in nodes]
        yield tuple(Slot(*node, len(own), own) for node, own in zip(nodes, shared, strict=True))


def _missing(wanted: str, offers: Sequence[Offer]) -> str:
    table = "\n".join(f"  {offer.ip:<20} {offer.num_gpus} GPUs" for offer in offers)
    return f"the cluster does not offer {wanted}; it has\n{table or '  no node at all'}"


def service_ports(
    base: int, count: int, *, engines: Sequence[Sequence[Slot]], num_stages: int, over_tcp: bool = False
) -> Ports:
    """Ports from the block ``[base, base + count)``; ``over_tcp``: processes of an engine talk over TCP as well.

    ``engines`` are those of the placement. Two engines have the same ports when they share no node, so the block
    bounds the engines of one node and not those of the run.

    Raises PlacementError when the block is too small.
    """
    an_engine = 2 + (DERIVED_PORTS if over_tcp else 0)
    places = _places_on_nodes(engines)
    num_places = max(places, default=-1) + 1
    needed = an_engine * num_places + SHARED_PORTS + num_stages
    if needed > count:
        raise PlacementError(
            f"{num_places} engines on one node and {num_stages} pipeline stages need {needed} ports, the job's block "
            f"has {count} from {base}; use fewer engines on a node (--rollout-num-gpus-per-engine)"
        )
    shared = base + an_engine * num_places
    return Ports(
        engines=tuple(base + an_engine * place for place in places),
        engine_groups=tuple(base + an_engine * place + 1 for place in places),
        router=shared,
        router_metrics=shared + 1,
        actor_group=shared + 2,
        sync_groups=tuple(range(shared + SHARED_PORTS, shared + SHARED_PORTS + num_stages)),
    )


def _places_on_nodes(engines: Sequence[Sequence[Slot]]) -> list[int]:
    """For each engine the lowest number that no engine before it has on any of its nodes."""
    taken: dict[str, set[int]] = defaultdict(set)
    places = []
    for parts in engines:
        on_its_nodes = [taken[part.ip] for part in parts]
        place = next(number for number in itertools.count() if not any(number in own for own in on_its_nodes))
        for own in on_its_nodes:
            own.add(place)
        places.append(place)
    return places
