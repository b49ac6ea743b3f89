"""Plan an update in which each engine rank receives only what it holds, from the settings. Pure.

Input: the shape of a model, the trainer's layout, and how an engine's GPUs share the weights. Output:
the plan of ``rlpost.config.plan.shard_plan``, and what its busiest GPU sends and receives. In a run
the trainer's ranks and the engines describe what they hold; here both follow from their layouts.
Approximations: rows of linear attention count as contiguous, a shard in FP8 as whole blocks, and an
encoder of images as whole on each GPU.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from common.fleet_name import POLICY
from rlpost.config.engine_groups import engines_to_place
from rlpost.config.engine_nodes import part_sizes, take_nodes
from rlpost.config.plan.shape import Layout, Shape
from rlpost.config.plan.shard_plan import (
    SentTensor,
    ShardPlan,
    Unit,
    no_garbage_collection,
    plan_shards,
)
from rlpost.extensions.planning.engine_memory import EngineShares, engine_shares
from rlpost.extensions.planning.update_weights import PlannedWeight, Sharding, weights_of
from rlpost.models.fp8 import SIDE
from rlpost.models.regions import BoxGroup, Index

if TYPE_CHECKING:
    from rlpost.config.tree import Config

DTYPES = {2: "bfloat16", 4: "float32"}
"""By bytes of a weight."""


@dataclass(frozen=True, slots=True)
class SentWeights:
    """The weights that are sent."""

    shape: Shape
    encoder: int
    """Trained weights of an encoder of images."""
    width: int
    """Bytes of a weight."""
    in_fp8: bool
    """Whether the matrices of the layers are in FP8."""


@dataclass(frozen=True, slots=True)
class Receivers:
    """The engines."""

    shares: EngineShares
    num_engines: int
    gpus_per_node: int
    on_trainer: bool
    """Whether they are on the trainer's GPUs."""
    nodes: tuple[int, ...]
    """The node of each rank of all engines."""
    trainers_per_node: int
    """Trainer ranks on each of the first nodes."""


@dataclass(frozen=True, slots=True)
class PlannedSlices:
    """All that the plan depends on."""

    weights: SentWeights
    layout: Layout
    receivers: Receivers
    max_bytes: int
    """Bytes of a bucket."""


@dataclass(frozen=True, slots=True)
class SliceFigures:
    """Bytes of the busiest ranks. What a GPU sends itself is not counted."""

    num_buckets: int
    sent: int
    """By a trainer rank."""
    received: int
    """By an engine rank."""
    between_nodes: int
    """Through the network card of one GPU, in one direction: each engine rank receives its own copy."""
    once_a_node: int
    """The same if every byte crossed the network once for all ranks of a node, whose cards share
    what the node receives, and NVLink did the rest. No transport does that yet."""


def receivers_of(config: Config, shape: Shape) -> Receivers:
    """The engines of the settings."""
    cluster = config.cluster
    return Receivers(
        shares=engine_shares(config, shape),
        num_engines=config.num_engines,
        gpus_per_node=cluster.num_gpus_per_node,
        on_trainer=cluster.colocate,
        nodes=policy_nodes(config),
        trainers_per_node=cluster.actor_num_gpus_per_node,
    )


def policy_nodes(config: Config) -> tuple[int, ...]:
    """Return the number of the node of each GPU of the policy's engines, engine by engine.

    Nodes are equal, and the trainer fills the first ones; ``driver.placement`` does the same with
    the nodes of a job.
    """
    cluster = config.cluster
    a_node, trainer_gpus = cluster.num_gpus_per_node, cluster.actor_num_gpus_per_node
    if cluster.colocate:
        return tuple(rank // trainer_gpus for rank in range(config.actor_world_size))
    free = [max(0, a_node - trainer_gpus)] * config.actor_num_nodes
    free += [a_node] * (config.num_nodes - config.actor_num_nodes)
    nodes: list[int] = []
    for name, gpus in engines_to_place(config):
        parts = part_sizes(gpus, a_node)
        while (chosen := take_nodes(free, parts)) is None:
            free.append(a_node)
        if name == POLICY:
            for node, size in zip(chosen, parts, strict=True):
                nodes += [node] * size
    return tuple(nodes)


# A search for layouts, and the rows of a plan, repeat the same few calls.
@lru_cache(maxsize=64)
def slice_figures(slices: PlannedSlices) -> SliceFigures:
    """What the plan moves. Takes from seconds to a minute for a model of hundreds of billions."""
    with no_garbage_collection():  # which would visit all messages again and again
        plan = slice_plan(slices)
        between, once = _between_nodes(plan, slices)
        return SliceFigures(
            num_buckets=len(plan.buckets),
            sent=max(plan.sent.values(), default=0),
            received=max(plan.received.values(), default=0),
            between_nodes=between,
            once_a_node=once,
        )


def slice_plan(slices: PlannedSlices) -> ShardPlan:
    """The plan of an update."""
    layout, receivers = slices.layout, slices.receivers
    units, kinds = _tensors(slices)
    sources = [list(_held(kinds, layout, rank)) for rank in range(layout.world)]
    of_engine = [list(_needed(kinds, slices, rank)) for rank in range(receivers.shares.gpus)]
    sinks = of_engine * receivers.num_engines
    beside = {rank: rank for rank in range(len(sinks))} if receivers.on_trainer else {}
    return plan_shards(units, sources, sinks, max_bytes=slices.max_bytes, beside=beside)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tensors that the same ranks hold and need in the same way."""

    stage: int
    shape: Index
    sharding: Sharding
    expert_rank: int | None = None
    """Of an expert: the trainer's expert-parallel rank that holds it."""
    expert_group: int | None = None
    """Of an expert: the GPUs of an engine that hold it, out of ``EngineShares.expert_groups``."""
    is_draft: bool = False


_Kinds = Mapping[_Kind, list[str]]


def _tensors(slices: PlannedSlices) -> tuple[list[Unit], _Kinds]:
    """All tensors in units, and their names by kind."""
    sent = slices.weights
    units: list[Unit] = []
    kinds: dict[_Kind, list[str]] = {}
    for number, weight in enumerate(_weights(slices)):
        copies = slices.layout.expert if weight.expert is not None else 1
        shapes_per_copy = len(weight.shapes) // copies
        for copy in range(copies):
            tensors: list[SentTensor] = []
            for part, shape in enumerate(weight.shapes[:shapes_per_copy]):
                name = f"{number}.{copy}.{part}"
                for tensor in _sent(name, shape, weight, sent):
                    tensors.append(tensor)
                    kind = _kind(weight, tensor.shape, copy, slices)
                    kinds.setdefault(kind, []).append(tensor.name)
            units.append(Unit(weight.stage, tuple(tensors)))
    return units, kinds


def _weights(slices: PlannedSlices) -> Iterator[PlannedWeight]:
    shape, encoder = slices.weights.shape, slices.weights.encoder
    yield from weights_of(shape, slices.layout)
    count = shape.vision.depth if encoder and shape.vision is not None else 0
    for _ in range(count):
        yield PlannedWeight(0, ((encoder // count,),))


def _sent(
    name: str, shape: Index, weight: PlannedWeight, sent: SentWeights
) -> Iterator[SentTensor]:
    if not (sent.in_fp8 and weight.is_quantised):
        yield SentTensor(name, shape, "float32" if weight.is_float32 else DTYPES[sent.width])
        return
    yield SentTensor(name, shape, "float8_e4m3fn")
    yield SentTensor(f"{name}.scales", tuple(-(-length // SIDE) for length in shape), "float32")


def _kind(weight: PlannedWeight, shape: Index, copy: int, slices: PlannedSlices) -> _Kind:
    sharding = weight.sharding
    if sharding.dim is not None and shape[sharding.dim] % sharding.grain:
        sharding = Sharding(sharding.dim, sharding.sharers)  # scales of blocks
    if weight.expert is None:
        return _Kind(weight.stage, shape, sharding, is_draft=weight.is_draft)
    count = slices.weights.shape.num_experts
    number = copy * (count // slices.layout.expert) + weight.expert
    group = number * slices.receivers.shares.expert_groups // count
    return _Kind(weight.stage, shape, sharding, copy, group, weight.is_draft)


def _held(kinds: _Kinds, layout: Layout, rank: int) -> Iterator[BoxGroup]:
    """What a trainer rank has; the order of ranks is that of ``rank_groups``."""
    stage, at = divmod(rank, layout.world // layout.pipeline)
    expert_rank = at // layout.expert_tensor % layout.expert
    for kind, names in kinds.items():
        if kind.stage != stage:
            continue
        if kind.sharding.sharers != "experts":
            yield _group(kind, names, at % layout.tensor, layout.tensor)
            continue
        shard = (at % layout.expert_tensor, layout.expert_tensor)
        if kind.expert_rank is None:  # one tensor holds all experts
            yield _group(kind, names, *shard, experts=(expert_rank, layout.expert))
        elif kind.expert_rank == expert_rank:
            yield _group(kind, names, *shard)


def _needed(kinds: _Kinds, slices: PlannedSlices, rank: int) -> Iterator[BoxGroup]:
    """What a rank of an engine has; adjacent ranks share (SGLang, ``parallel_state``)."""
    shares = slices.receivers.shares
    group_gpus = shares.gpus // shares.expert_groups
    group = rank // group_gpus
    sizes = {
        "none": 1,
        "attention": shares.attention,
        "output": shares.output,
        "dense": shares.dense,
        "all": shares.gpus,
    }
    for kind, names in kinds.items():
        if kind.is_draft and not shares.has_draft:
            continue
        if kind.sharding.sharers != "experts":
            size = sizes[kind.sharding.sharers]
            yield _group(kind, names, rank % size, size)
            continue
        shard = (rank % group_gpus, group_gpus)
        if kind.expert_group is None:
            yield _group(kind, names, *shard, experts=(group, shares.expert_groups))
        elif kind.expert_group == group:
            yield _group(kind, names, *shard)


def _group(
    kind: _Kind, names: list[str], rank: int, size: int, experts: tuple[int, int] = (0, 1)
) -> BoxGroup:
    """The box of a rank; ``experts``: its (rank, size) in the first dimension of stacked ones."""
    start, sizes = [0] * len(kind.shape), list(kind.shape)
    if experts[1] > 1:
        start[0], sizes[0] = _span(kind.shape[0], *experts, grain=1)
    dim = kind.sharding.dim
    if dim is not None:
        start[dim], sizes[dim] = _span(kind.shape[dim], rank, size, grain=kind.sharding.grain)
    return BoxGroup(tuple(names), tuple(start), tuple(sizes))


def _span(length: int, rank: int, size: int, *, grain: int) -> tuple[int, int]:
    """First row and number of rows of a rank: whole heads, which ranks share if there are fewer."""
    count = length // grain
    first, stop = count * rank // size, -(-count * (rank + 1) // size)
    return first * grain, (stop - first) * grain


def _between_nodes(plan: ShardPlan, slices: PlannedSlices) -> tuple[int, int]:
    """See ``SliceFigures``: bytes of the busiest card as it is, and once a node."""
    receivers = slices.receivers
    cards, a_node = receivers.gpus_per_node, receivers.trainers_per_node
    sent, received, sent_once = Counter[int](), Counter[int](), Counter[int]()
    received_by_node: Counter[int] = Counter()
    for message, size in itertools.chain.from_iterable(plan.sized):
        if message.sender // a_node != receivers.nodes[message.receiver]:
            sent[message.sender] += size
            received[message.receiver] += size
    for bucket in plan.buckets:
        # All receivers of a box get the same group, so its identity suffices.
        local: set[tuple[int, int]] = set()
        crossing: dict[tuple[int, int], tuple[int, BoxGroup]] = {}
        for message in bucket:
            node = receivers.nodes[message.receiver]
            for group in message.boxes.groups:
                if message.sender // a_node == node:
                    local.add((node, id(group)))
                else:
                    crossing.setdefault((node, id(group)), (message.sender, group))
        for key, (sender, group) in crossing.items():
            if key not in local:
                size = group.num_elements * plan.element_bytes[group.tensors[0]]
                sent_once[sender] += size
                received_by_node[key[0]] += size
    busiest = max(*sent.values(), *received.values(), 0, 0)
    once = max(*sent_once.values(), 0, 0)
    return busiest, max(once, max(received_by_node.values(), default=0) // cards)
