"""Facts about a rank with the parts of a checkpoint that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from rlpost.config.tree import Config
from rlpost.extensions.rehearsal.all_ranks.rank import BuiltRank, built_rank, facts_of
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts, Shape
from rlpost.trainer.model_description import ModelDescription, description_of
from rlpost.trainer.model_state import model_state
from rlpost.trainer.torch_dist.shards import chunks_of
from rlpost.trainer.torch_dist.written import (
    OPTIMIZER_PREFIX,
    Regions,
    regions_of_model,
    states_of,
    written_weights,
)

MOMENTS = f"{OPTIMIZER_PREFIX}exp_avg."


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """A box of one tensor of a checkpoint, which this rank writes."""

    key: str
    global_shape: Shape
    offset: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class SavedFacts(RankFacts):
    """Facts about a rank, and what it writes to a checkpoint."""

    checkpoint: tuple[CheckpointPart, ...] = ()
    """Parts of the weights and of one optimizer state; the other states are sharded alike."""


def build_ranks(config: Config) -> dict[int, SavedFacts]:
    """Build all ranks, one after another. Raises as ``rehearse_rank``."""
    description, world = description_of(config), config.actor_world_size
    return {rank: build_rank(config, description, rank=rank, world=world) for rank in range(world)}


def build_rank(
    config: Config, description: ModelDescription, *, rank: int, world: int
) -> SavedFacts:
    """Like ``rehearse_rank``."""
    with built_rank(config, description, rank=rank, world=world) as built:
        policy, *critics = map(_saved_facts, built)
    return replace(policy, critic=critics[0]) if critics else policy


def _saved_facts(built: BuiltRank) -> SavedFacts:
    facts = facts_of(built)
    values = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return SavedFacts(**values, checkpoint=tuple(_parts(built)))


def _parts(built: BuiltRank) -> Iterator[CheckpointPart]:
    """The boxes that this rank writes of the weights, and of the first moments."""
    regions = regions_of_model(model_state(built.chunks))
    states = [
        shard
        for shard in states_of(built.adam, regions, _on_first_replica(regions))
        if shard.prefix == MOMENTS
    ]
    for shard in [*written_weights(regions), *states]:
        for chunk in chunks_of(shard, max_bytes=built.config.checkpoint.save_buffer_bytes):
            yield CheckpointPart(chunk.key, chunk.global_shape, chunk.offsets, chunk.sizes)


def _on_first_replica(regions: Regions) -> set[torch.Tensor]:
    """The parameters whose state this rank's replicas write; ``written_states`` queries them."""
    return {tensor for tensor, found in regions.items() if not any(found[0].replica_id[:-1])}
