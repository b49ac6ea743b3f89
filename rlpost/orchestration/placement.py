"""Who runs where, and on which ports. Pure.

In: what each node offers and what the settings ask for. Out: one slot for each trainer rank and each engine, and the
ports of the run's own services. The same offers in the same order always give the same placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.config.tree import Config
from rlpost.errors import PlacementError

PORTS_PER_ENGINE = 2
SHARED_PORTS = 4


@dataclass(frozen=True, slots=True)
class Offer:
    """A node that is up: Ray's id for it, its address and its free GPUs."""

    node_id: str
    ip: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one worker of ``num_gpus`` GPUs."""

    node_id: str
    ip: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Placement:
    """``actors[rank]`` and ``engines[i]``."""

    actors: tuple[Slot, ...]
    engines: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of the run's services, all from the job's own block; the same numbers on every node."""

    engines: tuple[int, ...]
    engine_groups: tuple[int, ...]  # where the ranks inside one engine meet
    router: int
    router_metrics: int
    actor_group: int  # where the trainer's ranks meet
    sync_group: int  # where the trainer meets the engines


def place(offers: Sequence[Offer], config: Config) -> Placement:
    """Trainer ranks fill the first nodes in order; each engine goes to the node with the most GPUs left.

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
    engines = []
    per_engine = config.cluster.rollout_num_gpus_per_engine
    for _ in range(config.num_engines):
        index = max(range(len(free)), key=lambda i: (free[i], -i))
        if free[index] < per_engine:
            wanted = f"{config.num_engines} engines of {per_engine} GPUs beside {len(actors)} trainer ranks"
            raise PlacementError(_missing(wanted, offers))
        free[index] -= per_engine
        engines.append(Slot(offers[index].node_id, offers[index].ip, per_engine))
    return Placement(tuple(actors), tuple(engines))


def _missing(wanted: str, offers: Sequence[Offer]) -> str:
    table = "\n".join(f"  {offer.ip:<20} {offer.num_gpus} GPUs" for offer in offers)
    return f"the cluster does not offer {wanted}; it has\n{table or '  no node at all'}"


def service_ports(base: int, count: int, num_engines: int) -> Ports:
    """Ports from the block ``[base, base + count)``. Raises PlacementError when it is too small."""
    needed = PORTS_PER_ENGINE * num_engines + SHARED_PORTS
    if needed > count:
        raise PlacementError(f"{num_engines} engines need {needed} ports, the job's block has {count} from {base}")
    shared = base + PORTS_PER_ENGINE * num_engines
    return Ports(
        engines=tuple(base + PORTS_PER_ENGINE * i for i in range(num_engines)),
        engine_groups=tuple(base + PORTS_PER_ENGINE * i + 1 for i in range(num_engines)),
        router=shared,
        router_metrics=shared + 1,
        actor_group=shared + 2,
        sync_group=shared + 3,
    )
