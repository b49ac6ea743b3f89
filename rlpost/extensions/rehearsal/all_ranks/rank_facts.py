"""Facts about a rank after its model and optimizer are built. Pure data.

Sizes are in elements unless a name says bytes. Shapes are those of this rank's shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlpost.models.names import Layout
from rlpost.trainer.weights.inventory import Entry

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or expert bias of this rank; layers and experts count over the whole model."""

    name: str
    hugging_face: tuple[str, ...]
    """The tensors of the checkpoint that it holds, in memory order.

    ``name[3]`` is expert 3 of a tensor that holds all experts. Empty for an adapter.
    """
    layout: Layout
    shape: Shape
    dim: int | None
    """The dimension along which the weight is sharded; None when this rank holds all of it."""
    shard: int
    num_shards: int
    is_expert: bool
    """Whether Megatron reduces its gradient over the expert-data-parallel ranks."""
    is_parameter: bool
    """False for a buffer of the router."""
    is_trained: bool
    is_tied_copy: bool
    """Whether it repeats the embedding as the output layer of the last pipeline stage."""
    optimizer: tuple[int, int] | None
    """The range of the flattened shard whose optimizer state is on this rank; None if there is none."""
    is_float32: bool = False
    """Whether it is float32 in a model of 16 bits."""

    @property
    def size(self) -> int:
        """Elements of the shard."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that the rank allocates, except activations and Adam's moments."""

    weights: int
    gradients: int
    main_weights: int
    """The optimizer's weights in float32 beside those of the model."""


@dataclass(frozen=True, slots=True)
class UpdateRole:
    """The part of the rank in a weight update of engines on other GPUs."""

    stage: int
    gathers: bool
    """Whether it takes part in gathering the buckets of its stage."""
    is_source: bool
    """Whether it broadcasts them."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank of the trainer."""

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    """The members of the rank's groups, by kind of group (``tensor``, ``expert_data``).

    Megatron's other groups have their names in Megatron.
    """
    weights: tuple[Weight, ...]
    num_parameters: int
    """Elements of all parameters of its modules."""
    entries: tuple[Entry, ...]
    """The weights of its pipeline stage, as the weight-update plan counts them."""
    memory: Memory
    update: UpdateRole
    adapters: tuple[Weight, ...] = ()
    """The factors of low-rank updates, which are trained in place of the weights."""
    critic: RankFacts | None = None
    """The value model of this rank, of a run with PPO."""

    @property
    def trained(self) -> Iterator[Weight]:
        """Everything that the optimizer updates."""
        return (one for one in (*self.weights, *self.adapters) if one.is_trained)
