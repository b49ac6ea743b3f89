"""Regions: where the elements of a Hugging Face tensor are stored on one rank. Pure Python.

A weight update moves boxes of tensors from ranks that hold them to ranks that need them. Both
sides describe what they hold as regions: the trainer from the layouts of its parameters, an engine
from what its model does with the tensors that it loads. The map from a tensor's indices to storage
is affine on a region, so the intersection of two regions is a region on either side.

A message carries boxes from one rank to another. Its bytes are the boxes in order without padding,
each contiguous (the last index fastest) in the dtype of its tensor. Boxes of larger elements come
first, so that each starts at a multiple of its element size. The receiver copies a box into each
of its regions that intersects it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Index = tuple[int, ...]

BY_NAME = ""
"""The ``parameter`` of a tensor that a model loads as a whole, in a way that is not a region.

The region is then the whole tensor in temporary memory, contiguous.
"""


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of ``tensor`` whose index is in [start, start + size) in every dimension."""

    tensor: str
    start: Index
    size: Index

    @property
    def num_elements(self) -> int:
        """The number of elements; 1 for a scalar, which has no dimensions."""
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common elements; None if there are none.

        Raises:
            ValueError: the boxes of one tensor differ in the number of dimensions.
        """
        if self.tensor != other.tensor:
            return None
        starts, sizes = [], []
        edges = zip(self.start, self.size, other.start, other.size, strict=True)
        for own_start, own_size, other_start, other_size in edges:
            start = max(own_start, other_start)
            stop = min(own_start + own_size, other_start + other_size)
            if stop <= start:
                return None
            starts.append(start)
            sizes.append(stop - start)
        return Box(self.tensor, tuple(starts), tuple(sizes))


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a Hugging Face tensor in the storage of a parameter.

    The element at index i of ``tensor``, start <= i < start + size, is at element
    ``offset + sum(strides[d] * (i[d] - start[d]))`` of the parameter's storage.
    """

    tensor: str
    start: Index
    size: Index
    parameter: str
    offset: int
    strides: Index

    @property
    def box(self) -> Box:
        return Box(self.tensor, self.start, self.size)

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    def narrow(self, box: Box) -> Region:
        """The part of this region that holds ``box``, which lies in it."""
        steps = zip(self.strides, box.start, self.start, strict=True)
        offset = self.offset + sum(stride * (new - old) for stride, new, old in steps)
        return Region(self.tensor, box.start, box.size, self.parameter, offset, self.strides)


def intersect(one: Region, other: Region) -> tuple[Region, Region] | None:
    """The common elements of two regions, in the storage of each; None if there are none."""
    box = one.box.intersect(other.box)
    return None if box is None else (one.narrow(box), other.narrow(box))


def contiguous_strides(shape: Sequence[int]) -> Index:
    """The strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def contiguous(box: Box, parameter: str) -> Region:
    """The region of a box that fills a contiguous parameter."""
    return Region(box.tensor, box.start, box.size, parameter, 0, contiguous_strides(box.size))


def whole_box(tensor: str, shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box(tensor, (0,) * len(shape), tuple(shape))


def whole(tensor: str, shape: Sequence[int]) -> Region:
    """The region of a tensor that is loaded by name: all of it, contiguous."""
    return contiguous(whole_box(tensor, shape), BY_NAME)


def disjoint(boxes: Sequence[Box]) -> list[Box]:
    """Boxes that cover the same elements once."""
    found: list[Box] = []
    for box in boxes:
        remaining = [box]
        for other in found:
            remaining = [rest for part in remaining for rest in without(part, other)]
        found += remaining
    return found


def without(box: Box, other: Box) -> list[Box]:
    """The elements of ``box`` that are not in ``other``, as boxes."""
    common = box.intersect(other)
    if common is None:
        return [box]
    rest = []
    for dim in range(len(box.size)):
        before = common.start[dim] - box.start[dim]
        after = box.size[dim] - before - common.size[dim]
        if before:
            rest.append(_span(box, dim, box.start[dim], before))
        if after:
            rest.append(_span(box, dim, common.start[dim] + common.size[dim], after))
        box = _span(box, dim, common.start[dim], common.size[dim])
    return rest


def _span(box: Box, dim: int, start: int, size: int) -> Box:
    starts, sizes = list(box.start), list(box.size)
    starts[dim], sizes[dim] = start, size
    return Box(box.tensor, tuple(starts), tuple(sizes))


def in_parts(box: Box, count: int) -> list[Box]:
    """At most ``count`` parts of about the same size, along the longest of the outer dimensions."""
    if not box.size:
        return [box]
    dim = next((at for at, size in enumerate(box.size) if size >= count), len(box.size) - 1)
    size = box.size[dim]
    edges = sorted({size * part // count for part in range(count + 1)})
    return [
        _span(box, dim, box.start[dim] + first, last - first)
        for first, last in itertools.pairwise(edges)
    ]


@dataclass(frozen=True, slots=True)
class BoxGroup:
    """The same box of several tensors: most tensors of a model differ from others only in the name."""

    tensors: tuple[str, ...]
    start: Index
    size: Index
    is_by_name: bool = False
    """Whether a receiver loads these tensors by name; not used in messages."""

    @property
    def num_elements(self) -> int:
        """The number of elements of all boxes."""
        return math.prod(self.size) * len(self.tensors)


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes in order, kept as groups: a large model has millions."""

    groups: tuple[BoxGroup, ...] = ()

    def __iter__(self) -> Iterator[Box]:
        for group in self.groups:
            for tensor in group.tensors:
                yield Box(tensor, group.start, group.size)

    @staticmethod
    def of(boxes: Iterable[Box]) -> Boxes:
        """The boxes in their order."""
        groups = []
        for (start, size), alike in itertools.groupby(boxes, lambda box: (box.start, box.size)):
            groups.append(BoxGroup(tuple(box.tensor for box in alike), start, size))
        return Boxes(tuple(groups))


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to another in one bucket; see the module for its bytes."""

    sender: int
    receiver: int
    boxes: Boxes


def grouped(regions: Iterable[Region]) -> list[BoxGroup]:
    """The boxes of a rank's regions: each once, and those of equal start and size in one group."""
    tensors: dict[tuple[Index, Index, bool], dict[str, None]] = {}
    for region in regions:
        key = (region.start, region.size, region.parameter == BY_NAME)
        tensors.setdefault(key, {})[region.tensor] = None
    return [
        BoxGroup(tuple(names), start, size, is_by_name)
        for (start, size, is_by_name), names in tensors.items()
    ]


def group_to_json(group: BoxGroup, numbers: Mapping[str, int]) -> list[object]:
    """A group as a JSON array.

    Tensors by their ``numbers``, because names are a hundred bytes, and at least three numbers at
    equal distances as one array: the experts of a layer.
    """
    tensors = _runs([numbers[name] for name in group.tensors])
    return [list(group.start), list(group.size), group.is_by_name, tensors]


def group_from_json(fields: Sequence[Any], names: Sequence[str]) -> BoxGroup:
    """The inverse of ``group_to_json``; ``names`` by number."""
    start, size, is_by_name, runs = fields
    tensors: list[str] = []
    for run in runs:
        tensors += [names[run]] if isinstance(run, int) else names[slice(*run)]
    return BoxGroup(tuple(tensors), tuple(start), tuple(size), bool(is_by_name))


def _runs(numbers: Sequence[int]) -> list[int | list[int]]:
    """The numbers in order; an ascending run of at least three as its start, stop and step."""
    runs: list[int | list[int]] = []
    at, count = 0, len(numbers)
    while at < count:
        end, step = at + 1, 0
        if end < count:
            step = numbers[end] - numbers[at]
        while end < count and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - at < 3 or step <= 0:
            runs.append(numbers[at])
            at += 1
            continue
        runs.append([numbers[at], numbers[end - 1] + 1, step])
        at = end
    return runs
