"""List the weights that an update sends, and how ranks share them. Pure.

Input: the shape of a model, and pipeline stages and expert-parallel ranks of the trainer. Output: a
``PlannedWeight`` for each entry of ``rlpost.trainer.weights.inventory``, in its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rlpost.config.plan.shape import Latent, Layout, LinearAttention, Shape, layers_of
from rlpost.models.fp8 import SIDE, keeps_shared_experts

Sharers = Literal["none", "attention", "output", "dense", "all", "experts"]
"""The GPUs of an engine that share a tensor (``engine_memory.EngineShares``); none: each has all."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How ranks share the tensors of a weight."""

    dim: int | None = None
    """The dimension that tensor-parallel ranks shard; None if each has all of it."""
    sharers: Sharers = "none"
    grain: int = 1
    """Rows that stay together: those of a head."""


@dataclass(frozen=True)
class PlannedWeight:
    """A Megatron parameter: its Hugging Face tensors, and whether FP8 checkpoints quantise it."""

    stage: int
    shapes: tuple[tuple[int, ...], ...]
    is_quantised: bool = False
    sharding: Sharding = Sharding()
    expert: int | None = None
    """Of an expert, or of those of all expert-parallel ranks: its number on its rank."""
    is_draft: bool = False
    """Whether it is of the layer for multi-token prediction."""
    is_float32: bool = False
    """Whether it is float32 in a model of 16 bits."""

    def num_bytes(self, *, width: int, in_fp8: bool) -> int:
        """Bytes that are sent, ``width`` for each element unless it is in FP8 or float32."""
        if self.is_float32:
            return self._elements * 4
        if not (in_fp8 and self.is_quantised):
            return self._elements * width
        return self._elements + 4 * self._blocks

    @cached_property
    def _elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def _blocks(self) -> int:
        """FP8 blocks of all tensors."""
        return sum(map(_num_blocks, self.shapes))


def weights_of(shape: Shape, layout: Layout) -> Iterator[PlannedWeight]:
    """All weights of a model in the order of ``rlpost.trainer.weights.inventory``."""
    last = layout.pipeline - 1
    owner = {
        layer: stage
        for stage in range(layout.pipeline)
        for layer in layers_of(layout, shape.num_layers, stage)
    }
    yield PlannedWeight(0, ((shape.vocab, shape.hidden),), sharding=BY_ATTENTION)
    for layer in range(shape.num_layers):
        if shape.linear is not None and shape.linear.layers[layer]:
            yield from _linear(shape, shape.linear, owner[layer])
        else:
            yield from _attention(shape, owner[layer])
        yield from _mlp(shape, owner[layer], layout, is_sparse=shape.sparse[layer])
    if shape.mtp:
        for weight in _mtp(shape, layout, last):
            yield replace(weight, is_draft=True)
    yield PlannedWeight(last, ((shape.hidden,),))
    if not shape.tied:
        output = Sharding(0, "output")
        yield PlannedWeight(last, ((shape.vocab, shape.hidden),), sharding=output)


BY_ATTENTION = Sharding(0, "attention")
"""Rows on the GPUs of an attention replica."""
OUTPUT_OF_ATTENTION = Sharding(1, "attention")
NARROW = Sharding(0)
"""Projections to narrow vectors: the trainer shards them, each GPU of an engine has all."""


def _mtp(shape: Shape, layout: Layout, stage: int) -> Iterator[PlannedWeight]:
    norm = PlannedWeight(stage, ((shape.hidden,),))
    yield from [norm] * 2
    yield PlannedWeight(stage, ((shape.hidden, 2 * shape.hidden),), sharding=NARROW)
    yield from _attention(shape, stage)
    yield norm
    yield from _mlp(shape, stage, layout, is_sparse=shape.sparse[-1])


def _attention(shape: Shape, stage: int) -> Iterator[PlannedWeight]:
    if shape.latent is not None:
        yield from _latent(shape, shape.latent, stage)
        return
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    hidden = shape.hidden
    rows = (queries * (2 if shape.output_gate else 1), keys, keys)
    heads = Sharding(0, "attention", shape.head_dim)
    norm = PlannedWeight(stage, ((hidden,),))
    yield norm
    yield PlannedWeight(
        stage, ((hidden, queries),), is_quantised=True, sharding=OUTPUT_OF_ATTENTION
    )
    matrices = tuple((count, hidden) for count in rows)
    yield PlannedWeight(stage, matrices, is_quantised=True, sharding=heads)
    if shape.qkv_bias:
        yield PlannedWeight(stage, tuple((count,) for count in rows), sharding=heads)
    if shape.linear_bias:
        yield PlannedWeight(stage, ((hidden,),))
    if shape.sinks:
        yield PlannedWeight(stage, ((shape.heads,),), sharding=BY_ATTENTION)
    if shape.qk_norm_per_layer:
        for count in (queries, keys):
            yield PlannedWeight(stage, ((count,),), sharding=heads)
    elif shape.qk_norm:
        yield from [PlannedWeight(stage, ((shape.head_dim,),))] * 2
    yield norm
    if shape.sandwich:
        yield from [norm] * 2


def _latent(shape: Shape, latent: Latent, stage: int) -> Iterator[PlannedWeight]:
    norm = PlannedWeight(stage, ((shape.hidden,),))
    output, *to_queries, kv_down, kv_up = shape.attention_matrices
    if latent.query_rank:  # engines need both in one bucket
        narrow = (to_queries.pop(0), kv_down)
        yield PlannedWeight(stage, narrow, is_quantised=True, sharding=NARROW)
    yield norm
    yield PlannedWeight(stage, (output,), is_quantised=True, sharding=OUTPUT_OF_ATTENTION)
    for matrix in to_queries:
        yield PlannedWeight(stage, (matrix,), is_quantised=True, sharding=BY_ATTENTION)
    if not latent.query_rank:
        yield PlannedWeight(stage, (kv_down,), is_quantised=True, sharding=NARROW)
    yield PlannedWeight(stage, (kv_up,), is_quantised=True, sharding=BY_ATTENTION)
    for rank in filter(None, (latent.query_rank, latent.kv_rank)):
        yield PlannedWeight(stage, ((rank,),))
    yield norm


def _linear(shape: Shape, one: LinearAttention, stage: int) -> Iterator[PlannedWeight]:
    hidden, channels = shape.hidden, 2 * one.keys + one.values
    heads = BY_ATTENTION
    yield from [PlannedWeight(stage, ((hidden,),))] * 2
    qkvz = ((channels + one.values, hidden),)
    yield PlannedWeight(stage, qkvz, is_quantised=True, sharding=heads)
    yield PlannedWeight(stage, ((2 * one.value_heads, hidden),), sharding=heads)
    output = ((hidden, one.values),)
    yield PlannedWeight(stage, output, is_quantised=True, sharding=OUTPUT_OF_ATTENTION)
    yield PlannedWeight(stage, ((channels, 1, one.kernel),), sharding=heads)
    yield PlannedWeight(stage, ((one.value_heads,),), sharding=heads, is_float32=True)
    yield PlannedWeight(stage, ((one.value_heads,),), sharding=heads)
    yield PlannedWeight(stage, ((one.value_dim,),), is_float32=True)


def _mlp(shape: Shape, stage: int, layout: Layout, *, is_sparse: bool) -> Iterator[PlannedWeight]:
    if not is_sparse:
        yield from _gated(stage, shape.hidden, shape.ffn, "dense")
        return
    yield PlannedWeight(stage, ((shape.num_experts, shape.hidden),))
    if shape.linear_bias:
        yield PlannedWeight(stage, ((shape.num_experts,),))
    if shape.shared_ffn:
        in_fp8 = not keeps_shared_experts(shape.shared_ffn)
        yield from _gated(stage, shape.hidden, shape.shared_ffn, "all", in_fp8=in_fp8)
    if shape.shared_gate:
        yield PlannedWeight(stage, ((1, shape.hidden),))
    if shape.stacked_experts:
        yield from _stacked(shape, stage)
        return
    at_one_place = tuple(
        _gated(stage, shape.hidden, shape.expert_ffn, "experts", copies=layout.expert)
    )
    for number in range(shape.num_experts // layout.expert):
        for weight in at_one_place:
            yield replace(weight, expert=number)


def _stacked(shape: Shape, stage: int) -> Iterator[PlannedWeight]:
    """The experts of a layer, each matrix of all of them in one tensor."""
    count, hidden, ffn = shape.num_experts, shape.hidden, shape.expert_ffn
    for matrix, bias, dim in (((hidden, 2 * ffn), 2 * ffn, 2), ((ffn, hidden), hidden, 1)):
        yield PlannedWeight(stage, ((count, *matrix),), sharding=Sharding(dim, "experts"))
        if shape.linear_bias:
            of_bias = Sharding(1 if dim == 2 else None, "experts")
            yield PlannedWeight(stage, ((count, bias),), sharding=of_bias)


def _gated(
    stage: int,
    hidden: int,
    ffn: int,
    sharers: Sharers,
    *,
    copies: int = 1,
    in_fp8: bool = True,
) -> Iterator[PlannedWeight]:
    inputs, output = ((ffn, hidden),) * 2 * copies, ((hidden, ffn),) * copies
    yield PlannedWeight(stage, inputs, is_quantised=in_fp8, sharding=Sharding(0, sharers))
    yield PlannedWeight(stage, output, is_quantised=in_fp8, sharding=Sharding(1, sharers))


def _num_blocks(shape: Sequence[int]) -> int:
    return math.prod(-(-length // SIDE) for length in shape)
