"""Find contradictions in the facts about all ranks of a configuration. Pure.

Input: facts, the planner's layout and shape, the model of transformers. Output: one line per
contradiction; an empty list when groups, weights, optimizer, checkpoint, memory and weight-update
plan agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import (
    Layout,
    Parameters,
    layout_of,
    rank_parameters,
)
from rlpost.config.plan.shape import Shape as ModelShape
from rlpost.config.tree import Config
from rlpost.extensions.planning.adapters import adapter_parameters
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts, Weight
from rlpost.models.config_file import language_model
from rlpost.models.family import Family
from rlpost.trainer.weights.exporter import Exporter
from rlpost.trainer.weights.inventory import Entry, Inventory, in_order
from rlpost.trainer.weights.layouts import tensor_bytes
from rlpost.trainer.weights.quantise import BlockFp8
from rlpost.trainer.weights.trainer_side import Buckets
from rlpost.types import Bucket
from tests.contract.all_ranks import coverage
from tests.contract.all_ranks.published import Published, published
from tests.contract.all_ranks.rank_coordinates import KINDS, members, place


@dataclass(frozen=True, slots=True)
class Expected:
    """The values that the facts are compared with."""

    config: Config
    shape: ModelShape
    published: Published

    @property
    def layout(self) -> Layout:
        return layout_of(self.config)


def expected_of(config: Config, hf: Mapping[str, object], known: Family | None = None) -> Expected:
    """Return the expected values for a configuration, by the config.json of its model, the whole file."""
    has_mtp = config.grpo.enable_mtp_training
    shape = replace(hf_shape(language_model(hf)), mtp=has_mtp)
    return Expected(config, shape, published(hf, known, with_mtp=has_mtp))


def group_problems(ranks: Mapping[int, RankFacts], layout: Layout) -> Iterator[str]:
    """Check that each rank is in one group of each kind, with the layout's members in order."""
    for kind in KINDS:
        wanted = members(layout, kind)
        for rank, facts in ranks.items():
            found = facts.groups.get(kind)
            if found != wanted[rank]:
                yield f"rank {rank}: its {kind} group is {found}, the layout requires {wanted[rank]}"
        groups = {facts.groups.get(kind, ()) for facts in ranks.values()}
        listed = sorted(chain.from_iterable(groups))
        if listed != list(range(layout.world)):
            yield f"{kind} groups: together they list the ranks {listed}, not each of {layout.world} once"


def parameter_problems(ranks: Mapping[int, RankFacts], expected: Expected) -> Iterator[str]:
    """Compare parameter counts: of each rank with the planner, of all ranks with transformers."""
    layout = expected.layout
    for rank, facts in ranks.items():
        built_parameters = parameters_of(facts)
        planned_parameters = rank_parameters(expected.shape, layout, place(layout, rank).pipeline)
        if built_parameters != planned_parameters:
            yield f"rank {rank}: {built_parameters} are built, the planner counts {planned_parameters}"
        held = built_parameters.total + sum(one.size for one in facts.adapters)
        if held != facts.num_parameters:
            yield f"rank {rank}: its modules have {facts.num_parameters} parameters, the weights {held}"
    total = expected.published.num_parameters
    if (counted := expected.shape.parameters.total) != total:
        yield f"the planner counts {counted} parameters of the model, transformers has {total}"
    if (built := num_distinct(ranks, expected)) != total:
        yield f"all ranks together have {built} parameters, each counted once; transformers has {total}"


def num_distinct(ranks: Mapping[int, RankFacts], expected: Expected) -> int:
    """Return the parameters of all ranks, without adapters, replicas and vocabulary padding."""
    shards = {
        (weight.name, weight.shard): weight.size
        for facts in ranks.values()
        for weight in facts.weights
        if weight.is_parameter and not weight.is_tied_copy
    }
    padded_rows = -expected.shape.vocab % expected.layout.tensor
    num_padded = 1 if expected.shape.tied else 2
    return sum(shards.values()) - num_padded * padded_rows * expected.shape.hidden


def parameters_of(facts: RankFacts) -> Parameters:
    """Return the parameters that a rank holds, without adapters."""
    return _counted(weight for weight in facts.weights if weight.is_parameter)


def _counted(weights: Iterable[Weight]) -> Parameters:
    counted = list(weights)
    return Parameters(
        dense=sum(weight.size for weight in counted if not weight.is_expert),
        expert=sum(weight.size for weight in counted if weight.is_expert),
        float32=sum(weight.size for weight in counted if weight.is_float32),
    )


def adapter_problems(ranks: Mapping[int, RankFacts], expected: Expected) -> Iterator[str]:
    """Check that adapters have the planner's sizes, and each shard its place."""
    lora, layout = expected.config.lora, expected.layout
    if lora.lora_rank is None:
        return
    shards: dict[tuple[str, int], set[int]] = {}
    for rank, facts in ranks.items():
        where, built_parameters = place(layout, rank), _counted(facts.adapters)
        planned_parameters = adapter_parameters(lora, expected.shape, layout, where.pipeline)
        if built_parameters != planned_parameters:
            yield f"rank {rank}: {built_parameters} are in adapters, the planner counts {planned_parameters}"
        for one in facts.adapters:
            shards.setdefault((one.name, one.num_shards), set()).add(one.shard)
            coordinate = where.expert_tensor if one.is_expert else where.tensor
            if one.num_shards > 1 and one.shard != coordinate:
                yield f"rank {rank}: it holds shard {one.shard} of {one.name}, its place is {coordinate}"
    for (name, count), held in shards.items():
        if held != set(range(count)):
            yield f"{name}: its shards are {sorted(held)}, {count} are needed"


def num_adapted(expected: Expected) -> int | None:
    """Return the elements of all adapters of the model; None without adapters."""
    if expected.config.lora.lora_rank is None:
        return None
    return adapter_parameters(expected.config.lora, expected.shape, Layout(), 0).total


def plan_problems(
    ranks: Mapping[int, RankFacts], plans: Mapping[int, Plan], expected: Expected
) -> Iterator[str]:
    """Check the weight-update plan.

    It is equal on all ranks, has every tensor of the checkpoint once with its shape, and each
    bucket belongs to one pipeline stage and is within the size limit.
    """
    first = plans[0]
    for rank, plan in plans.items():
        if plan is not first and plan != first:
            yield f"rank {rank}: its weight-update plan differs from that of rank 0"
    tensors = expected.published.tensors
    planned = Counter(name for bucket in first for name in bucket.names)
    for bucket in first:
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            if tensors.get(name) != shape:
                yield f"weight update: {name} has the shape {shape}, transformers says {tensors.get(name)}"
            stage = coverage.stage_of(name, expected.layout, expected.shape.num_layers)
            if bucket.stage != stage:
                yield f"weight update: {name} is sent by stage {bucket.stage}, stage {stage} holds it"
    for name in tensors:
        if planned[name] != 1:
            yield f"weight update: {name} is in {planned[name]} buckets, 1 is needed"
    limit = expected.config.sync.update_weight_buffer_size
    alone = {
        entry.hugging_face
        for facts in ranks.values()
        for entry in facts.entries
        if entry.num_bytes > limit
    }
    for number, bucket in enumerate(first):
        size = sum(tensor_bytes(bucket).values())
        if size > limit and bucket.names not in alone:
            yield f"weight update: bucket {number} has {size} bytes, --update-weight-buffer-size is {limit}"


def sender_problems(ranks: Mapping[int, RankFacts], layout: Layout) -> Iterator[str]:
    """Check that one rank of each stage sends, and that the ranks it gathers from take part."""
    for stage in range(layout.pipeline):
        sources = [
            facts
            for facts in ranks.values()
            if facts.update.is_source and facts.update.stage == stage
        ]
        if len(sources) != 1:
            yield f"stage {stage}: the ranks {[facts.rank for facts in sources]} send its weights, one is needed"
        for source in sources:
            if place(layout, source.rank).pipeline != stage:
                yield f"rank {source.rank}: it sends the weights of stage {stage}, which it does not hold"
            needed = {
                *source.groups["tensor"],
                *source.groups["expert_tensor"],
                *source.groups["expert"],
            }
            absent = sorted(rank for rank in needed if not ranks[rank].update.gathers)
            if absent:
                yield f"stage {stage}: the ranks {absent} hold shards but take no part in gathering them"


Plan = tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class _Entries:
    """The part of an inventory that an exporter plans with; there are no weights behind it."""

    entries: tuple[Entry, ...]


def update_plans(
    ranks: Mapping[int, RankFacts],
    config: Config,
    *,
    gpu_bytes: int,
    quantisation: BlockFp8 | None = None,
) -> dict[int, Plan]:
    """The update plan of each rank with all its pipeline group in ``ranks``; equal inputs share one.

    ``gpu_bytes``: memory of a GPU, which bounds the size of a bucket.
    """
    # Each rank's entries are hashed once; a plan is looked up by the identity of its stages'
    # entries.
    distinct: dict[tuple[Entry, ...], tuple[Entry, ...]] = {}
    held = {
        rank: distinct.setdefault(facts.entries, facts.entries) for rank, facts in ranks.items()
    }
    plan_by_key: dict[tuple[int, ...], Plan] = {}
    plans: dict[int, Plan] = {}
    for rank, facts in ranks.items():
        peers = facts.groups["pipeline"]
        if not all(peer in ranks for peer in peers):
            continue
        stages = tuple(held[peer] for peer in peers)
        key = tuple(map(id, stages))
        if key not in plan_by_key:
            buckets = Buckets(
                Exporter(cast(Inventory, _Entries(in_order(stages)))),
                limit=config.sync.update_weight_buffer_size,
                num_engines=config.num_engines,
                device_bytes=gpu_bytes,
                quantisation=quantisation,
            )
            plan_by_key[key] = buckets.plan
        plans[rank] = plan_by_key[key]
    return plans
