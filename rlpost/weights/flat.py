"""Tensors of several dtypes as one piece of bytes, and back.

Invariant: nothing is padded, and a tensor begins at a multiple of its element's size as long as those with larger
elements come first (``widest_first``): all views are aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[...] -> [nbytes], uint8."""
    return tensor.contiguous().flatten().view(torch.uint8)


def widest_first(named: Mapping[str, T], widths: Mapping[str, int]) -> dict[str, T]:
    """The same, those with larger elements first and else in order."""
    return {name: named[name] for name in sorted(named, key=lambda name: -widths[name])}


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def pack(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The bytes of the tensors, one after another: [num_bytes], uint8."""
    return torch.cat([as_bytes(tensor) for tensor in tensors])


def unpack(flat: torch.Tensor, likes: Iterable[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """Views of what ``pack`` made, given the shapes and dtypes of the tensors."""
    tensors, start = [], 0
    for shape, dtype in likes:
        end = start + num_bytes(shape, dtype)
        tensors.append(flat[start:end].view(dtype).view(tuple(shape)))
        start = end
    return tensors
