"""Layouts: map Hugging Face tensors to one Megatron parameter, and shard it for tensor parallelism.

``merge`` and ``split`` convert full tensors between both sides; ``shard`` and ``join`` shard and
restore a full Megatron tensor. Each pair is a bitwise inverse: values are moved, never computed.
Works on meta tensors too, so that shapes can be planned without data. The rows and their order are
those of ``rlpost.models.layout_rows``: a weight is [out, in], a vector [out].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from rlpost.errors import WeightError
from rlpost.models.layout_rows import TRANSPOSED, WITHOUT_ROWS, held_rows, segments
from rlpost.models.names import Dimensions, Layout
from rlpost.types import Bucket


def merge(tensors: Sequence[torch.Tensor], layout: Layout, dims: Dimensions) -> torch.Tensor:
    """Full Hugging Face tensors -> the full Megatron tensor (without padding of the vocabulary)."""
    if layout in WITHOUT_ROWS:
        gate, up = tensors[0][..., ::2], tensors[0][..., 1::2]
        return torch.cat([gate, up], dim=-1).t()  # a vector stays as it is
    if layout in TRANSPOSED:
        return tensors[0].mT
    if len(tensors) == 1 and not layout.startswith("linear"):
        return tensors[0]
    parts = segments(layout, dims, sum(map(len, tensors)))
    return torch.cat([tensors[one.part].narrow(0, one.source, one.count) for one in parts])


def split(tensor: torch.Tensor, layout: Layout, dims: Dimensions) -> tuple[torch.Tensor, ...]:
    """Split a full Megatron tensor into full, contiguous Hugging Face tensors.

    Padding of the vocabulary is removed.
    """
    if layout in WITHOUT_ROWS:
        gate, up = tensor.t().chunk(2, dim=-1)
        return (torch.stack([gate, up], dim=-1).flatten(-2),)
    if layout in TRANSPOSED:
        return (tensor.mT.contiguous(),)
    if layout in ("plain", "fused_gated"):
        return (tensor,)
    parts: dict[int, list[torch.Tensor]] = {}
    for one in sorted(segments(layout, dims, len(tensor)), key=lambda one: one.source):
        parts.setdefault(one.part, []).append(tensor.narrow(0, one.row, one.count))
    return tuple(_joined(parts[part], dim=0).contiguous() for part in sorted(parts))


def shard(tensor: torch.Tensor, layout: Layout, *, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return the shard along ``dim`` of tensor-parallel ``rank`` of ``size``.

    The rows of a vocabulary are padded with zeros to a multiple of ``size``.

    Raises:
        WeightError: the dimension is not a multiple of ``size``.
    """
    if size == 1:
        return tensor
    if layout == "vocabulary":
        tensor = F.pad(tensor, (0, 0, 0, -tensor.size(0) % size))
    try:
        ranges = held_rows(layout, tensor.size(dim), rank=rank, size=size)
    except WeightError as error:
        shape = tuple(tensor.shape)
        raise WeightError(f"a tensor of shape {shape}, dimension {dim}: {error}") from error
    return _joined([tensor.narrow(dim, start, count) for start, count in ranges], dim=dim)


def join(shards: Sequence[torch.Tensor], layout: Layout, *, dim: int) -> torch.Tensor:
    """The full Megatron tensor from the shards of all tensor-parallel ranks, in order."""
    size = len(shards)
    if size == 1:
        return shards[0]
    pieces: dict[int, torch.Tensor] = {}
    for rank, one in enumerate(shards):
        local = 0
        for start, count in held_rows(layout, size * one.size(dim), rank=rank, size=size):
            pieces[start] = one.narrow(dim, local, count)
            local += count
    return _joined([pieces[start] for start in sorted(pieces)], dim=dim)


def _joined(parts: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[...] -> [nbytes], uint8.

    There is no padding. With tensors of larger elements first (``exporter.describe``) every tensor
    starts at a multiple of its element size, so all views are aligned.
    """
    return tensor.contiguous().flatten().view(torch.uint8)


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def tensor_bytes(bucket: Bucket) -> dict[str, int]:
    """Return the bytes of each tensor of a bucket, by name."""
    tensors = zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True)
    return {name: num_bytes(shape, getattr(torch, dtype)) for name, shape, dtype in tensors}


def pack(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate the bytes of the tensors: [num_bytes], uint8."""
    return torch.cat([as_bytes(tensor) for tensor in tensors])


def unpack(
    flat: torch.Tensor, likes: Iterable[tuple[Sequence[int], torch.dtype]]
) -> list[torch.Tensor]:
    """Return views of the output of ``pack``, given the shapes and dtypes of the tensors."""
    tensors, start = [], 0
    for shape, dtype in likes:
        end = start + num_bytes(shape, dtype)
        tensors.append(flat[start:end].view(dtype).view(tuple(shape)))
        start = end
    return tensors
