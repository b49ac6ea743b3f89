"""Placement of trainer ranks and engines on nodes, and the ports of their services. Pure.

Input: the resources of each node and the settings. Output: one slot for each trainer rank and each
engine, and the ports of the run's services. Equal nodes in equal order always give the same
placement.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.fleet_name import POLICY
from common.units import counted
from rlpost.config.engine_groups import engines_to_place, group_config
from rlpost.config.engine_nodes import part_sizes, take_nodes
from rlpost.config.tree import Config
from rlpost.errors import PlacementError

SHARED_PORTS = 1
DERIVED_PORTS = 13
"""With data-parallel attention, SGLang's processes use TCP ports after that of the rendezvous: six in
``PortArgs.init_new``, and the 13th (``DP_ATTENTION_HANDSHAKE_PORT_DELTA``).
"""


@dataclass(frozen=True, slots=True)
class Offer:
    """A running node: Ray's id for it, its address and its free GPUs."""

    node_id: str
    ip: str
    num_gpus: int

    def slot(self, num_gpus: int) -> Slot:
        return Slot(self.node_id, self.ip, num_gpus)


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker's place, with ``num_gpus`` GPUs, exclusive or shared with ranks of the policy."""

    node_id: str
    ip: str
    num_gpus: int
    shared_with: tuple[int, ...] = ()

    def gpu_variables(self, visible_gpus: Sequence[str]) -> dict[str, str]:
        """Environment for the GPUs of the ranks that share the slot; ``visible_gpus`` by rank."""
        ids = [visible_gpus[rank] for rank in self.shared_with if visible_gpus[rank]]
        return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of the ranks that train, and of each engine's parts.

    An engine has one part per node; part 0 serves. ``groups`` are the engines of the tables
    [engines.NAME] by name; ``engines`` those of the policy.
    """

    actors: tuple[Slot, ...]
    engines: tuple[tuple[Slot, ...], ...]
    groups: Mapping[str, tuple[tuple[Slot, ...], ...]] = field(default_factory=dict)

    def of_group(self, name: str) -> Placement:
        """Return the placement as a group of engines sees it: its engines alone.

        For the policy's group this is the whole placement.
        """
        if name == POLICY:
            return self
        return Placement((), self.groups[name])

    @property
    def all_engines(self) -> tuple[tuple[Slot, ...], ...]:
        """The engines of all groups, the policy's first."""
        return (*self.engines, *itertools.chain.from_iterable(self.groups.values()))

    @property
    def ranks_of_engines(self) -> tuple[tuple[int, ...], ...]:
        """Trainer ranks on each engine's GPUs, in the engine's order; empty for exclusive GPUs."""
        return tuple(map(_sharing_ranks, self.engines))


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of the run's services, all from the job's own block.

    Engines on different nodes may share numbers.
    """

    engines: tuple[int, ...]
    engine_groups: tuple[int, ...]  # rendezvous of each engine; derived ports follow
    actor_group: int  # rendezvous of the trainer ranks
    sync_groups: tuple[int, ...]  # rendezvous of each pipeline stage with the engines
    groups: Mapping[str, Ports] = field(default_factory=dict)  # of [engines.NAME], without trainer

    def of_group(self, name: str) -> Ports:
        """Return the ports of a group of engines; those of the run for the policy's."""
        return self if name == POLICY else self.groups[name]


def place(offers: Sequence[Offer], config: Config) -> Placement:
    """Place trainer ranks and engines on nodes.

    Trainer ranks fill the first nodes in order. The policy's engines share their GPUs
    (``--colocate``), or each engine is placed on the node with the most free GPUs; an engine larger
    than a node takes whole nodes. So are the engines of all groups, the largest first.

    Raises PlacementError, with a table of the GPUs of each node, when something does not fit.
    """
    per_node = config.cluster.actor_num_gpus_per_node
    free = [offer.num_gpus for offer in offers]
    able = [index for index, gpus in enumerate(free) if gpus >= per_node][: config.actor_num_nodes]
    if len(able) < config.actor_num_nodes:
        raise PlacementError(
            _missing(
                f"{counted(config.actor_num_nodes, 'node')} with {counted(per_node, 'GPU')} to train",
                offers,
            )
        )
    actors = _ranks_on(able, offers, free, per_node)
    groups = _engines(offers, free, config, beside=counted(len(actors), "trainer rank"))
    engines = tuple(groups.pop(POLICY, ()))
    if config.cluster.colocate:
        engines = tuple(_beside(actors, config.cluster.rollout_num_gpus_per_engine))
    group_engines = {name: tuple(groups.get(name, ())) for name in config.engines.started}
    return Placement(actors, engines, group_engines)


def _engines(
    offers: Sequence[Offer], free: list[int], config: Config, *, beside: str
) -> dict[str, list[tuple[Slot, ...]]]:
    """Place the engines with GPUs of their own, by group, and subtract these from ``free``."""
    engines = engines_to_place(config)
    placed: dict[str, list[tuple[Slot, ...]]] = defaultdict(list)
    for name, gpus in engines:
        parts = part_sizes(gpus, config.cluster.num_gpus_per_node)
        chosen = take_nodes(free, parts)
        if chosen is None:
            count = counted(sum(other == name for other, _ in engines), "engine")
            suffix = "" if name == POLICY else f" for [engines.{name}]"
            what = f"{count} of {counted(gpus, 'GPU')}{suffix} beside {beside}"
            others = len(engines) - sum(other == name for other, _ in engines)
            what += f" and {counted(others, 'other engine')}" if others else ""
            raise PlacementError(_missing(what, offers))
        pairs = zip(chosen, parts, strict=True)
        placed[name].append(tuple(offers[node].slot(size) for node, size in pairs))
    return placed


def _ranks_on(
    chosen: Sequence[int], offers: Sequence[Offer], free: list[int], per_node: int
) -> tuple[Slot, ...]:
    """Return the slots of ranks on the chosen nodes, and subtract their GPUs from ``free``."""
    found: list[Slot] = []
    for index in chosen:
        free[index] -= per_node
        found += [offers[index].slot(1)] * per_node
    return tuple(found)


def replaced(placement: Placement, lost_ip: str, offer: Offer) -> Placement:
    """Move every slot on a lost node to another node; everything else stays, ports as well.

    Raises PlacementError when the other node has fewer GPUs than the slots need.
    """
    parts = [part for engine in placement.all_engines for part in engine]
    moving = [slot for slot in (*placement.actors, *parts) if slot.ip == lost_ip]
    needed = sum(slot.num_gpus for slot in moving if not slot.shared_with)
    if needed > offer.num_gpus:
        raise PlacementError(
            f"{offer.ip} has {counted(offer.num_gpus, 'GPU')} and cannot replace {lost_ip}, where the run "
            f"uses {needed}"
        )

    def moved(slots: Sequence[Slot]) -> tuple[Slot, ...]:
        return tuple(
            replace(slot, node_id=offer.node_id, ip=offer.ip) if slot.ip == lost_ip else slot
            for slot in slots
        )

    return Placement(
        moved(placement.actors),
        tuple(map(moved, placement.engines)),
        {name: tuple(map(moved, engines)) for name, engines in placement.groups.items()},
    )


def order_by_gpu(actors: Sequence[Slot], positions: Sequence[int | None]) -> tuple[int, ...]:
    """Return the worker of each rank, so that ranks of a node are in the order of its GPUs.

    Workers never change nodes, so slots stay the same. Adjacent ranks are then adjacent in the
    node's topology: tensor-parallel traffic stays local to a switch, and collectives of each rank
    stay on its rail.

    Args:
        positions: position of each worker's GPU on its node. If one is unknown or two are equal,
            the order on that node is kept.
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


def _beside(actors: Sequence[Slot], per_engine: int) -> Iterator[tuple[Slot, ...]]:
    """Yield the slots of colocated engines, in the order of the trainer ranks."""
    for first in range(0, len(actors), per_engine):
        ranks = range(first, first + per_engine)
        shared: dict[tuple[str, str], list[int]] = {}
        for rank in ranks:
            shared.setdefault((actors[rank].node_id, actors[rank].ip), []).append(rank)
        yield tuple(Slot(*node, len(own), tuple(own)) for node, own in shared.items())


def _missing(wanted: str, offers: Sequence[Offer]) -> str:
    table = "\n".join(f"  {offer.ip:<20} {counted(offer.num_gpus, 'GPU')}" for offer in offers)
    return f"the cluster does not offer {wanted}; it has\n{table or '  no node at all'}"


def service_ports(
    base: int,
    count: int,
    *,
    engines: Sequence[Sequence[Slot]],
    num_stages: int,
    over_tcp: bool = False,
    groups: Mapping[str, Sequence[Sequence[Slot]]] | None = None,
) -> Ports:
    """Assign ports from the block ``[base, base + count)``; ``over_tcp``: add SGLang's TCP ports.

    ``engines`` and ``groups`` are those of the placement. Two engines have the same ports when they
    share no node, so the block bounds the engines of one node and not those of the run.

    Raises PlacementError when the block is too small.
    """
    an_engine = 2 + (DERIVED_PORTS if over_tcp else 0)
    groups = groups or {}
    places = _places_on_nodes([*engines, *itertools.chain.from_iterable(groups.values())])
    num_places = max(places, default=-1) + 1
    needed = an_engine * num_places + SHARED_PORTS + num_stages
    if needed > count:
        raise PlacementError(
            f"{num_places} engines on one node and {num_stages} pipeline stages need {needed} ports, the job's block "
            f"has {count} from {base}; use fewer engines on a node (--rollout-num-gpus-per-engine)"
        )
    shared = base + an_engine * num_places
    ports = iter([base + an_engine * place for place in places])
    policy_ports = tuple(itertools.islice(ports, len(engines)))
    group_ports = {}
    for name, others in groups.items():
        starts = tuple(itertools.islice(ports, len(others)))
        group_ports[name] = Ports(starts, tuple(port + 1 for port in starts), 0, ())
    return Ports(
        engines=policy_ports,
        engine_groups=tuple(port + 1 for port in policy_ports),
        groups=group_ports,
        actor_group=shared,
        sync_groups=tuple(range(shared + SHARED_PORTS, shared + SHARED_PORTS + num_stages)),
    )


def ports_of_run(config: Config, placement: Placement, *, base: int, count: int) -> Ports:
    """Assign the ports of a run from the block ``[base, base + count)``.

    Raises PlacementError when the block is too small.
    """
    # The last port of the block serves Prometheus.
    kept = 1 if config.observe.use_prometheus else 0
    return service_ports(
        base,
        count - kept,
        engines=placement.engines,
        num_stages=config.perf.pipeline_model_parallel_size,
        over_tcp=any(
            group.sglang.shares_attention
            for group in (config, *(group_config(config, name) for name in config.engines.started))
        ),
        groups=placement.groups,
    )


def _places_on_nodes(engines: Sequence[Sequence[Slot]]) -> list[int]:
    """Return for each engine the lowest number that no earlier engine has on any of its nodes."""
    taken: dict[str, set[int]] = defaultdict(set)
    places = []
    for parts in engines:
        on_its_nodes = [taken[part.ip] for part in parts]
        used = set().union(*on_its_nodes)
        place = next(number for number in itertools.count() if number not in used)
        for own in on_its_nodes:
            own.add(place)
        places.append(place)
    return places


def _sharing_ranks(slots: Sequence[Slot]) -> tuple[int, ...]:
    return tuple(rank for slot in slots for rank in slot.shared_with)
