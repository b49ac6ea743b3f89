"""Copies between strided views as regions of a tensor. Pure Python.

Input: a copy from a view of a contiguous tensor to a view of a parameter's storage. Output: the
regions (``rlpost.models.regions``) that describe it, or None if it takes too many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlpost.models.regions import Box, Region

MAX_REGIONS = 4096
"""Of one copy. A copy with more is cheaper as a whole tensor."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a storage: index i is at element ``offset + sum(strides[d] * i[d])``."""

    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        """The largest element; the view is not empty."""
        steps = zip(self.strides, self.size, strict=True)
        return self.offset + sum(stride * (size - 1) for stride, size in steps)


@dataclass(frozen=True, slots=True)
class _Run:
    """``size`` steps along one dimension of a tensor."""

    size: int
    step: int
    """In elements of the dimension."""
    target: int
    """In elements of the parameter's storage."""


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def regions_of(
    tensor: str, shape: Sequence[int], source: View, parameter: str, target: View
) -> list[Region] | None:
    """Describe a copy of ``source``, a view of ``tensor``, to ``target``; both have one size.

    Returns None for a view that boxes of the tensor do not describe, or only too many.
    """
    steps = zip(source.size, source.strides, target.strides, strict=True)
    runs = [(size, stride, to) for size, stride, to in steps if size != 1]
    repeated = [(size, to) for size, stride, to in runs if stride == 0]
    per_dim = _runs_per_dim(shape, source.offset, [run for run in runs if run[1] != 0])
    if per_dim is None:
        return None
    start = _index(shape, source.offset)
    pieces = [
        list(_pieces(first, dim_runs)) for first, dim_runs in zip(start, per_dim, strict=True)
    ]
    copies = [range(size) for size, _ in repeated]
    if math.prod(map(len, [*pieces, *copies])) > MAX_REGIONS:
        return None
    regions = []
    for chosen in itertools.product(*pieces):
        offset = target.offset + sum(piece.target for piece in chosen)
        starts = tuple(piece.start for piece in chosen)
        sizes, strides = (
            tuple(piece.size for piece in chosen),
            tuple(piece.stride for piece in chosen),
        )
        for numbers in itertools.product(*copies):
            more = sum(number * to for number, (_, to) in zip(numbers, repeated, strict=True))
            regions.append(Region(tensor, starts, sizes, parameter, offset + more, strides))
    return regions


def boxes_of(shape: Sequence[int], view: View) -> list[Box] | None:
    """The boxes of a contiguous tensor that a view covers; None as in ``regions_of``."""
    regions = regions_of("", shape, view, "", view)
    return None if regions is None else [region.box for region in regions]


def overlap(shape: Sequence[int], one: View, other: View) -> bool:
    """Whether two views of a contiguous tensor share an element; True if that is not known."""
    if one.last < other.offset or other.last < one.offset:
        return False
    ours, theirs = boxes_of(shape, one), boxes_of(shape, other)
    if ours is None or theirs is None or len(ours) * len(theirs) > MAX_REGIONS:
        return True
    return any(box.intersect(another) is not None for box in ours for another in theirs)


def _index(shape: Sequence[int], element: int) -> tuple[int, ...]:
    """The index of an element of a contiguous tensor."""
    index = []
    for stride in row_strides(shape):
        index.append(element // stride)
        element %= stride
    return tuple(index)


def _runs_per_dim(
    shape: Sequence[int], offset: int, runs: list[tuple[int, int, int]]
) -> list[list[_Run]] | None:
    """Assign each dimension of a view to that dimension of the tensor in which it steps.

    A dimension of the view that runs over several of the tensor (``flatten``) is split. None if it
    leaves a dimension of the tensor in another way.
    """
    strides, start = row_strides(shape), _index(shape, offset)
    pending = list(runs)
    per_dim: list[list[_Run]] = [[] for _ in shape]
    while pending:
        size, stride, target = pending.pop()
        dim = _dim_of(shape, strides, stride)
        if dim is None:
            return None
        step = stride // strides[dim]
        if start[dim] + (size - 1) * step >= shape[dim]:
            # all of this dimension, several times
            if step != 1 or start[dim] != 0 or size % shape[dim]:
                return None
            outer = (size // shape[dim], stride * shape[dim], target * shape[dim])
            pending.append(outer)
            size = shape[dim]
        per_dim[dim].append(_Run(size, step, target))
    for dim, dim_runs in enumerate(per_dim):
        if start[dim] + sum((run.size - 1) * run.step for run in dim_runs) >= shape[dim]:
            return None
    return per_dim


def _dim_of(shape: Sequence[int], strides: Sequence[int], stride: int) -> int | None:
    """The outermost dimension that a stride is a multiple of."""
    for dim, (size, own) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and own <= stride and stride % own == 0:
            return dim
    return None


@dataclass(frozen=True, slots=True)
class _Piece:
    """An interval of one dimension of the tensor."""

    start: int
    size: int
    stride: int
    target: int
    """Element of the parameter's storage at which it starts, from the start of the copy."""


def _pieces(start: int, runs: list[_Run]) -> Iterator[_Piece]:
    """Yield the intervals of one dimension that nested runs cover."""
    size, stride, others = 1, 0, []
    for run in sorted(runs, key=lambda run: run.step):
        if run.step == size and (size == 1 or run.target == size * stride):
            stride = run.target if size == 1 else stride
            size *= run.size
        else:
            others.append(run)
    for numbers in itertools.product(*(range(run.size) for run in others)):
        steps = list(zip(numbers, others, strict=True))
        yield _Piece(
            start + sum(number * run.step for number, run in steps),
            size,
            stride,
            sum(number * run.target for number, run in steps),
        )
