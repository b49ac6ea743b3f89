"""Split a flat sequence into consecutive parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from rlpost.types import SampleGroup

T = TypeVar("T")
Part = TypeVar("Part", covariant=True)


class Sliceable(Protocol[Part]):
    """A sequence whose slices are of type ``Part``."""

    def __getitem__(self, where: slice, /) -> Part: ...


def partition(values: Sliceable[Part], sizes: Iterable[int]) -> list[Part]:
    """Return consecutive slices of these sizes.

    >>> partition("abcde", [2, 3])
    ['ab', 'cde']
    """
    end = 0
    parts: list[Part] = []
    for size in sizes:
        parts.append(values[end : end + size])
        end += size
    return parts


def by_group(groups: Sequence[SampleGroup], values: Sequence[T]) -> list[Sequence[T]]:
    """Return the values of a rollout's samples, in order, by group."""
    return partition(values, [len(group.samples) for group in groups])
