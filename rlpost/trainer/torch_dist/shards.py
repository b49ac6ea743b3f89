"""This rank's shards of the tensors of a checkpoint.

Input: the sharded state dict of the model and the states of its optimizer. Output: shards (runs of
consecutive elements of a parameter, with a function that reads them) and the chunks in which they
are written or read.

The format is Megatron's "fully_reshardable": Adam's state of a weight ``W`` is
``optimizer.state.exp_avg.W``, with the shape of ``W``. Megatron gathers that state on one
data-parallel rank; here every rank writes and reads the elements that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from rlpost.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Region:
    """A run of consecutive elements of a parameter, and its box in a tensor of the checkpoint."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offsets of the box in the checkpoint's tensor."""
    shape: tuple[int, ...]
    """Shape of the box, with as many axes as the checkpoint's tensor."""
    start: int
    """Index of its first element in the flattened parameter."""
    replica_id: tuple[int, ...]
    """Megatron's: all zeros on the main replica; the last entry is the data-parallel rank."""
    may_differ: bool
    """Whether the checkpoint's tensor may have another shape (a padded vocabulary)."""

    @property
    def end(self) -> int:
        """Index after its last element."""
        return self.start + math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of a row of the first axis that is longer than 1."""
        axes = [size for size in self.shape if size > 1]
        return math.prod(axes[1:]) if axes else 1


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements ``start`` to ``end`` of a parameter, or of an optimizer state of the same shape."""

    prefix: str
    """Prefix of the keys; empty for weights."""
    regions: tuple[Region, ...]
    start: int
    end: int
    dtype: torch.dtype
    live: Callable[[], torch.Tensor]
    """Returns the flat tensor with these elements; do not slice it while it is offloaded."""
    origin: int = 0
    """Index in the parameter of the first element of the live tensor."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box that is written or read in one operation: consecutive elements of a shard."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard: Shard
    start: int
    """Index of its first element in the live tensor."""
    may_differ: bool = False

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.shard.dtype.itemsize

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements, [numel], of the live tensor or of a copy of it; shares its memory."""
        return flat[self.start : self.start + self.numel]


def regions_of(part: ShardedTensor | ShardedTensorFactory) -> tuple[Region, ...]:
    """Map the elements of a parameter to tensors of the checkpoint.

    A factory (a fused gate and up projection) stores a parameter as several tensors. The mapping is
    found by letting the factory split a meta tensor.

    Raises:
        CheckpointError: a piece is not contiguous.
    """
    probe = torch.empty(part.data.shape, dtype=part.data.dtype, device="meta")
    described = replace(part, data=probe)
    pieces = (
        [described] if isinstance(part, ShardedTensor) else list(nested_values(described.build()))
    )
    return tuple(_region(piece) for piece in pieces)


def _region(piece: ShardedTensor) -> Region:
    if not piece.data.is_contiguous():
        raise CheckpointError(
            f"{piece.key}: Megatron stores it in pieces that are not contiguous in memory; "
            "this writer cannot shard them over data-parallel ranks"
        )
    replica = piece.replica_id
    return Region(
        key=piece.key,
        global_shape=tuple(piece.global_shape),
        offsets=tuple(piece.global_offset),
        shape=(*[1] * piece.prepend_axis_num, *piece.local_shape),
        start=piece.data.storage_offset(),
        replica_id=(replica,) if isinstance(replica, int) else tuple(replica),
        may_differ=piece.allow_shape_mismatch,
    )


def chunks_of(shard: Shard, *, max_bytes: int) -> Iterator[Chunk]:
    """Split a shard into boxes of at most ``max_bytes`` (at least one element), in order."""
    max_numel = max(1, max_bytes // shard.dtype.itemsize)
    for region in shard.regions:
        start, end = max(shard.start, region.start), min(shard.end, region.end)
        inside = split_range(
            start - region.start, end - region.start, max_numel=max_numel, row=region.row
        )
        for first, last in inside:
            for box in boxes_of_range(region.shape, first, last):
                yield Chunk(
                    key=shard.prefix + region.key,
                    global_shape=region.global_shape,
                    offsets=tuple(map(sum, zip(region.offsets, box.offsets, strict=True))),
                    sizes=box.sizes,
                    shard=shard,
                    start=region.start + box.start - shard.origin,
                    may_differ=region.may_differ,
                )


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a row-major tensor whose elements are consecutive.

    A distributed optimizer shards its state without regard to parameters: a rank may hold the
    elements 1000 to 2000 of a matrix. Every such run is a few boxes, which a checkpoint stores, so
    each rank writes exactly what it holds, and any other layout can read it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Index of its first element in the flattened tensor."""

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Boxes that together contain the elements ``start`` to ``end`` (exclusive), in order.

    At most ``2 * len(shape) - 1``: the end of the first row, whole rows, the beginning of the last
    row, and recursively the same within the two partial rows.
    """
    if start >= end:
        return []
    if not shape:
        return [Box((), (), 0)]
    if len(shape) == 1:
        return [Box((start,), (end - start,), start)]
    row = math.prod(shape[1:])
    first_whole, last_whole = -(-start // row), end // row
    if first_whole > last_whole:  # the range lies within one row
        return _within_row(shape, first_whole - 1, start, end)
    boxes = []
    if start < first_whole * row:
        boxes += _within_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < last_whole:
        offsets = (first_whole, *[0] * (len(shape) - 1))
        boxes.append(Box(offsets, (last_whole - first_whole, *shape[1:]), first_whole * row))
    if last_whole * row < end:
        boxes += _within_row(shape, last_whole, last_whole * row, end)
    return boxes


def _within_row(shape: Sequence[int], index: int, start: int, end: int) -> list[Box]:
    """Boxes of a range within row ``index`` of the first axis."""
    begin = index * math.prod(shape[1:])
    inner = boxes_of_range(shape[1:], start - begin, end - begin)
    return [Box((index, *box.offsets), (1, *box.sizes), begin + box.start) for box in inner]


def split_range(start: int, end: int, *, max_numel: int, row: int) -> Iterator[tuple[int, int]]:
    """Split into consecutive ranges of at most ``max_numel`` elements.

    Where a row of ``row`` elements fits, ranges end at whole rows, which needs fewer boxes.
    """
    step = max_numel - max_numel % row if max_numel >= row else max_numel
    while start < end:
        stop = start + max_numel
        if step >= row:
            stop = min(stop, (start // row) * row + step)
        stop = min(max(stop, start + 1), end)
        yield start, stop
        start = stop


def share_of(numel: int, row: int, index: int, count: int) -> tuple[int, int]:
    """The range that replica ``index`` of ``count`` writes: whole rows, nearly equal parts."""
    num_rows = -(-numel // row)
    first, last = num_rows * index // count, num_rows * (index + 1) // count
    return min(first * row, numel), min(last * row, numel)
