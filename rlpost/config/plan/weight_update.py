"""Plan an update of the engines' weights: its bytes, buckets and requests. Pure.

Input: settings, the shape of the model and the memory of a GPU. Output: a ``PlannedUpdate``.

The trainer (``rlpost.trainer.weights.trainer_side.Buckets``) assigns the weights to buckets with the
same functions. They are listed as in ``rlpost.trainer.weights.inventory``: one entry for each Megatron
parameter; for experts, one for the parameters at the same place of all expert-parallel ranks. For
every bucket the driver sends one request to each engine, with the handles of all its ranks: large
buckets need fewer requests, but more memory on trainer and engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from rlpost.config.plan.adapters import served_adapters
from rlpost.config.plan.shape import Layout, LinearAttention, Shape, layers_of
from rlpost.models.fp8 import SIDE, keeps_shared_experts

if TYPE_CHECKING:
    from rlpost.config.tree import Config

FP8_WIDTH = 1


@dataclass(frozen=True)
class PlannedWeight:
    """A Megatron parameter: its Hugging Face tensors, and whether FP8 checkpoints quantise it."""

    stage: int
    shapes: tuple[tuple[int, ...], ...]
    is_quantised: bool = False

    def num_bytes(self, *, width: int, in_fp8: bool) -> int:
        """Bytes that are sent, ``width`` for each element unless it is in FP8."""
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


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One update of all engines."""

    total_bytes: int
    """Bytes of all weights, or of all adapters if only these are sent; each counts once."""
    num_buckets: int
    largest_bytes: int
    """Bytes of the largest bucket."""
    num_requests: int
    """Requests of the driver that move the buckets, for all engines together."""
    gpu_bytes: int
    """Bytes of buckets on a GPU that trainer and engine share, else on a GPU that sends."""
    engine_bytes: int = 0
    """The same on a GPU of an engine that receives them over the network; 0 otherwise."""


def weight_update(
    config: Config, shape: Shape, layout: Layout, *, gpu_bytes: int, width: int, in_fp8: bool
) -> PlannedUpdate:
    """The plan of an update.

    Args: ``width``: bytes of a weight in the trainer; ``in_fp8``: whether engines hold matrices in
    FP8.
    """
    if config.sends_adapters:
        written = width * served_adapters(config.lora, shape)
        return PlannedUpdate(written, num_buckets=0, largest_bytes=0, num_requests=0, gpu_bytes=0)
    # the rest of the layout does not change what is sent
    layout = Layout(
        pipeline=layout.pipeline,
        expert=layout.expert,
        chunk=layout.chunk,
        first=layout.first,
        last=layout.last,
    )
    (_, total), num_engines = _travelling(shape, layout, width, in_fp8), config.num_engines
    size = bucket_bytes(
        total,
        limit=config.sync.update_weight_buffer_size,
        num_engines=num_engines,
        device_bytes=gpu_bytes,
    )
    count, largest = _buckets(shape, layout, width, in_fp8, size)
    requests = count * num_engines
    if config.cluster.colocate:
        return PlannedUpdate(total, count, largest, requests, SHARED_BUFFERS * largest)
    received = 0 if config.sync.update_weight_transport == "disk" else RECEIVED_BUFFERS * largest
    return PlannedUpdate(total, count, largest, requests, SENT_BUFFERS * largest, received)


# A search for layouts repeats the same few calls many times.
@lru_cache(maxsize=128)
def _travelling(
    shape: Shape, layout: Layout, width: int, in_fp8: bool
) -> tuple[tuple[Travelling, ...], int]:
    """All weights with their bytes, and their sum."""
    weights = tuple(
        Travelling(weight.stage, weight.num_bytes(width=width, in_fp8=in_fp8))
        for weight in weights_of(shape, layout)
    )
    return weights, sum(weight.num_bytes for weight in weights)


@lru_cache(maxsize=1024)
def _buckets(
    shape: Shape, layout: Layout, width: int, in_fp8: bool, max_bytes: int
) -> tuple[int, int]:
    """The number of buckets, and the bytes of the largest."""
    weights, _ = _travelling(shape, layout, width, in_fp8)
    buckets = deal(weights, max_bytes)
    sizes = []
    for bucket in buckets:
        sizes.append(sum(weights[index].num_bytes for index in bucket))
    return len(buckets), max(sizes)


def weights_of(shape: Shape, layout: Layout) -> Iterator[PlannedWeight]:
    """All weights of a model in the order of ``rlpost.trainer.weights.inventory``."""
    last = layout.pipeline - 1
    owner = {
        layer: stage
        for stage in range(layout.pipeline)
        for layer in layers_of(layout, shape.num_layers, stage)
    }
    yield PlannedWeight(0, ((shape.vocab, shape.hidden),))
    for layer in range(shape.num_layers):
        if shape.linear is not None and shape.linear.layers[layer]:
            yield from _linear(shape, shape.linear, owner[layer])
        else:
            yield from _attention(shape, owner[layer])
        yield from _mlp(shape, owner[layer], layout, is_sparse=shape.sparse[layer])
    if shape.mtp:
        yield from [PlannedWeight(last, ((shape.hidden,),))] * 2
        yield PlannedWeight(last, ((shape.hidden, 2 * shape.hidden),))
        yield from _attention(shape, last)
        yield PlannedWeight(last, ((shape.hidden,),))
        yield from _mlp(shape, last, layout, is_sparse=shape.sparse[-1])
    yield PlannedWeight(last, ((shape.hidden,),))
    if not shape.tied:
        yield PlannedWeight(last, ((shape.vocab, shape.hidden),))


def _attention(shape: Shape, stage: int) -> Iterator[PlannedWeight]:
    if shape.latent is not None:
        norm = PlannedWeight(stage, ((shape.hidden,),))
        output, *to_queries, kv_down, kv_up = shape.attention_matrices
        if shape.latent.query_rank:  # engines need both in one bucket
            yield PlannedWeight(stage, (to_queries.pop(0), kv_down), is_quantised=True)
        else:
            to_queries.append(kv_down)
        yield norm
        for matrix in (output, *to_queries, kv_up):
            yield PlannedWeight(stage, (matrix,), is_quantised=True)
        for rank in filter(None, (shape.latent.query_rank, shape.latent.kv_rank)):
            yield PlannedWeight(stage, ((rank,),))
        yield norm
        return
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    hidden = shape.hidden
    rows = (queries * (2 if shape.output_gate else 1), keys, keys)
    norm = PlannedWeight(stage, ((hidden,),))
    yield norm
    yield PlannedWeight(stage, ((hidden, queries),), is_quantised=True)
    yield PlannedWeight(stage, tuple((count, hidden) for count in rows), is_quantised=True)
    if shape.qkv_bias:
        yield PlannedWeight(stage, tuple((count,) for count in rows))
    if shape.linear_bias:
        yield PlannedWeight(stage, ((hidden,),))
    if shape.sinks:
        yield PlannedWeight(stage, ((shape.heads,),))
    if shape.qk_norm_per_layer:
        yield from (PlannedWeight(stage, ((count,),)) for count in (queries, keys))
    elif shape.qk_norm:
        yield from [PlannedWeight(stage, ((shape.head_dim,),))] * 2
    yield norm
    if shape.sandwich:
        yield from [norm] * 2


def _linear(shape: Shape, one: LinearAttention, stage: int) -> Iterator[PlannedWeight]:
    hidden, channels = shape.hidden, 2 * one.keys + one.values
    yield from [PlannedWeight(stage, ((hidden,),))] * 2
    yield PlannedWeight(stage, ((channels + one.values, hidden),), is_quantised=True)
    yield PlannedWeight(stage, ((2 * one.value_heads, hidden),))
    yield PlannedWeight(stage, ((hidden, one.values),), is_quantised=True)
    yield PlannedWeight(stage, ((channels, 1, one.kernel),))
    yield from [PlannedWeight(stage, ((one.value_heads,),))] * 2
    yield PlannedWeight(stage, ((one.value_dim,),))


def _mlp(shape: Shape, stage: int, layout: Layout, *, is_sparse: bool) -> Iterator[PlannedWeight]:
    if not is_sparse:
        yield from _gated(stage, shape.hidden, shape.ffn)
        return
    yield PlannedWeight(stage, ((shape.num_experts, shape.hidden),))
    if shape.linear_bias:
        yield PlannedWeight(stage, ((shape.num_experts,),))
    if shape.shared_ffn:
        in_fp8 = not keeps_shared_experts(shape.shared_ffn)
        yield from _gated(stage, shape.hidden, shape.shared_ffn, in_fp8=in_fp8)
    if shape.shared_gate:
        yield PlannedWeight(stage, ((1, shape.hidden),))
    if shape.stacked_experts:
        yield from _stacked(shape, stage)
        return
    at_one_place = tuple(_gated(stage, shape.hidden, shape.expert_ffn, copies=layout.expert))
    for _ in range(shape.num_experts // layout.expert):
        yield from at_one_place


def _stacked(shape: Shape, stage: int) -> Iterator[PlannedWeight]:
    """The experts of a layer, each matrix of all of them in one tensor."""
    count, hidden, ffn = shape.num_experts, shape.hidden, shape.expert_ffn
    for matrix, bias in (((hidden, 2 * ffn), 2 * ffn), ((ffn, hidden), hidden)):
        yield PlannedWeight(stage, ((count, *matrix),))
        if shape.linear_bias:
            yield PlannedWeight(stage, ((count, bias),))


def _gated(
    stage: int, hidden: int, ffn: int, *, copies: int = 1, in_fp8: bool = True
) -> Iterator[PlannedWeight]:
    yield PlannedWeight(stage, ((ffn, hidden),) * 2 * copies, is_quantised=in_fp8)
    yield PlannedWeight(stage, ((hidden, ffn),) * copies, is_quantised=in_fp8)


def _num_blocks(shape: Sequence[int]) -> int:
    return math.prod(-(-length // SIDE) for length in shape)


SMALLEST = 512 * 2**20
"""Bytes of a bucket from which the transfer takes longer than the request."""
REQUESTS = 256
"""Target number of requests of an update, over all engines."""
MEMORY_SHARE = 1 / 6
"""Fraction of a GPU's memory that buckets may use."""
SHARED_BUFFERS = 3
"""Buckets on a GPU that trainer and engine share: one being gathered, two shared with the engine.
"""
SENT_BUFFERS = 2
"""Buckets on a GPU that sends: the tensors, and their concatenated bytes."""
RECEIVED_BUFFERS = 2
"""Buckets on an engine's GPU that receives: SGLang's ``_receive_bucketed_weights_from_distributed``
allocates a tensor for each name, and concatenates them into the tensor that it receives."""


@dataclass(frozen=True, slots=True)
class Travelling:
    """A weight to send: the pipeline stage that holds it, and its bytes."""

    stage: int
    num_bytes: int
    joins: bool = False
    """Whether it must be in the bucket of the weight before it, which is of the same stage."""


def bucket_bytes(total: int, *, limit: int, num_engines: int, device_bytes: int | None) -> int:
    """The size of a bucket for weights of ``total`` bytes.

    Args:
        total: bytes of all weights.
        limit: the user's bound in bytes (``--update-weight-buffer-size``).
        num_engines: number of engines.
        device_bytes: memory of a GPU; None on a CPU, where memory is not a bound.
    """
    for_few_requests = -(-total * max(1, num_engines) // REQUESTS)
    chosen = max(SMALLEST, for_few_requests)
    if device_bytes is not None:
        chosen = min(chosen, int(device_bytes * MEMORY_SHARE / SHARED_BUFFERS))
    return min(chosen, limit)


def deal(weights: Sequence[Travelling], max_bytes: int) -> list[list[int]]:
    """Indices of the weights of each bucket, by stage and in order.

    A bucket holds at most ``max_bytes`` of weights of one stage; a larger weight is alone in its
    bucket, with those that join it.
    """
    units: list[list[int]] = []
    for index in sorted(range(len(weights)), key=lambda index: weights[index].stage):
        if weights[index].joins:
            units[-1].append(index)
        else:
            units.append([index])
    buckets: list[list[int]] = []
    remaining, stage = 0, -1
    for unit in units:
        num_bytes = sum(weights[index].num_bytes for index in unit)
        if not buckets or num_bytes > remaining or weights[unit[0]].stage != stage:
            buckets.append([])
            remaining, stage = max_bytes, weights[unit[0]].stage
        buckets[-1] += unit
        remaining -= num_bytes
    return buckets
