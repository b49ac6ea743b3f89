"""Rows: how the rows of Hugging Face tensors lie in a Megatron tensor and in its shards. Pure Python.

Nearly every layout only moves rows: the Megatron tensor is a sequence of segments, each of
consecutive rows of one Hugging Face tensor. A transposed layout does so after the transposition.
This is the one description of a layout: ``rlpost.trainer.weights.layouts`` moves tensors by it, and
``shard_regions`` says which box of which tensor a shard holds.

Linear weights are [out, in]. Megatron's qkv concatenates, for each query group, the group's
queries, key and value. Its gated weight has [gate; up] in every shard, so sharding the full [gate;
up] regroups it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlpost.errors import WeightError
from rlpost.models.names import Dimensions, Layout
from rlpost.models.regions import Region, contiguous_strides

GATED = ("gated", "fused_gated", "transposed_gated")
TRANSPOSED = ("transposed", "transposed_gated")
WITHOUT_ROWS = ("interleaved_gated",)
"""Layouts that move single elements: gate and up alternate along the last axis."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a Megatron tensor that are consecutive in one Hugging Face tensor."""

    part: int
    """Which of the Hugging Face tensors."""
    source: int
    """Its first row there."""
    row: int
    """Its first row in the full Megatron tensor."""
    count: int


def segments(layout: Layout, dims: Dimensions, num_rows: int) -> tuple[Segment, ...]:
    """The segments of a full Megatron tensor of ``num_rows`` rows, in the order of its rows.

    They cover all rows, except those that pad a vocabulary.
    """
    blocks = _blocks(layout, dims, num_rows)
    filled: dict[int, int] = {}
    placed, row = [], 0
    for part, kind_start, count in blocks:
        source = kind_start if kind_start is not None else filled.get(part, 0)
        filled[part] = source + count
        placed.append(Segment(part, source, row, count))
        row += count
    return tuple(placed)


def _blocks(
    layout: Layout, dims: Dimensions, num_rows: int
) -> Iterator[tuple[int, int | None, int]]:
    """(part, first row there, rows) in the order of the Megatron tensor.

    A first row of None follows the block of that part before it.
    """
    if layout == "qkv":
        width = dims.head_dim
        queries = num_rows // dims.num_query_groups - 2 * width
        for _ in range(dims.num_query_groups):
            yield from ((0, None, queries), (1, None, width), (2, None, width))
    elif layout == "gated_qkv":
        yield from _gated_qkv_blocks(dims, num_rows)
    elif layout in ("linear_qkv", "linear_qkvz", "linear_ba"):
        yield from _key_head_blocks(layout, dims)
    elif layout == "gated":
        yield from ((0, 0, num_rows // 2), (1, 0, num_rows // 2))
    elif layout == "vocabulary":
        yield 0, 0, min(num_rows, dims.vocab_size)
    else:
        yield 0, 0, num_rows


def _gated_qkv_blocks(dims: Dimensions, num_rows: int) -> Iterator[tuple[int, int | None, int]]:
    """In the tensor of the queries each head is followed by its gate."""
    width = dims.head_dim
    heads = (num_rows // dims.num_query_groups // width - 2) // 2
    for group in range(dims.num_query_groups):
        for is_gate in (0, 1):
            for head in range(group * heads, (group + 1) * heads):
                yield 0, (2 * head + is_gate) * width, width
        yield from ((1, group * width, width), (2, group * width, width))


def _key_head_blocks(layout: Layout, dims: Dimensions) -> Iterator[tuple[int, int | None, int]]:
    """A tensor has its kinds one after another, and within a kind the key heads."""
    repeats = dims.linear_value_heads // dims.linear_key_heads
    values = repeats * dims.linear_value_dim
    qkv = (dims.linear_key_dim, dims.linear_key_dim, values)
    parts: tuple[tuple[int, ...], ...] = (qkv,)
    if layout == "linear_ba":
        parts = ((repeats,), (repeats,))
    elif layout == "linear_qkvz":
        parts = (qkv, (values,))
    for head in range(dims.linear_key_heads):
        for part, kinds in enumerate(parts):
            kind_start = 0
            for rows in kinds:
                yield part, kind_start + head * rows, rows
                kind_start += dims.linear_key_heads * rows


def held_rows(
    layout: Layout, num_rows: int, *, rank: int, size: int
) -> tuple[tuple[int, int], ...]:
    """(first row, number of rows) of a tensor-parallel rank's shard of a full Megatron tensor.

    In the order of the shard. ``num_rows`` includes the rows that pad a vocabulary.

    Raises:
        WeightError: the rows cannot be sharded over ``size`` ranks.
    """
    num_ranges = 2 if layout in GATED and size > 1 else 1
    if num_rows % (size * num_ranges):
        raise WeightError(
            f"{num_rows} rows in layout {layout} cannot be sharded with --tensor-model-parallel-size {size}; use a "
            f"size that divides {num_rows // num_ranges}"
        )
    count = num_rows // num_ranges // size
    return tuple(
        (half * (num_rows // num_ranges) + rank * count, count) for half in range(num_ranges)
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor-parallel shard of a Megatron tensor."""

    parameter: str
    shape: tuple[int, ...]
    layout: Layout
    tensors: tuple[str, ...]
    """Its Hugging Face tensors."""
    dim: int | None = None
    """The sharded dimension; None if the shard is all of the tensor."""
    rank: int = 0
    size: int = 1
    expert: int | None = None
    """Its index in the first dimension of a tensor that holds all experts; None elsewhere."""


def shard_regions(shard: Shard, dims: Dimensions) -> list[Region]:
    """The regions of the Hugging Face tensors that a contiguous shard holds.

    Raises:
        ValueError: the layout moves single elements.
    """
    if shard.layout in WITHOUT_ROWS:
        raise ValueError(f"{shard.parameter}: layout {shard.layout} has no regions")
    if not shard.shape:
        return [Region(shard.tensors[0], (), (), shard.parameter, 0, ())]
    num_rows, rank, size = shard.shape[0], 0, 1
    if shard.dim == 0:
        num_rows, rank, size = num_rows * shard.size, shard.rank, shard.size
    parts = segments(shard.layout, dims, num_rows)
    regions, local = [], 0
    for first, count in held_rows(shard.layout, num_rows, rank=rank, size=size):
        for part in parts:
            start, stop = max(first, part.row), min(first + count, part.row + part.count)
            if start < stop:
                rows = (part.source + start - part.row, stop - start)
                regions.append(_region(shard, part.part, rows, local + start - first))
        local += count
    return regions


def _region(shard: Shard, part: int, rows: tuple[int, int], local_row: int) -> Region:
    """The region of the (first, count) rows that are at ``local_row`` of the shard."""
    start = [rows[0], *[0] * (len(shard.shape) - 1)]
    size = [rows[1], *shard.shape[1:]]
    if shard.dim:
        start[shard.dim] = shard.rank * shard.shape[shard.dim]
    strides = list(contiguous_strides(shard.shape))
    offset = local_row * strides[0]
    if shard.layout in TRANSPOSED:
        for axes in (start, size, strides):
            axes[-2], axes[-1] = axes[-1], axes[-2]
    if shard.expert is not None:
        start, size, strides = (
            [shard.expert, *start],
            [1, *size],
            [math.prod(shard.shape), *strides],
        )
    return Region(
        shard.tensors[part], tuple(start), tuple(size), shard.parameter, offset, tuple(strides)
    )
