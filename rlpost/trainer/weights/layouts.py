"""Layouts: map Hugging Face tensors to one Megatron parameter, and shard it for tensor parallelism.

``merge`` and ``split`` convert full tensors between both sides; ``shard`` and ``join`` shard and
restore a full Megatron tensor. Each pair is a bitwise inverse: values are moved, never computed.
Works on meta tensors too, so that shapes can be planned without data.

Linear weights are [out, in]. Megatron's qkv concatenates, for each query group, the group's
queries, key and value. Its gated weight has [gate; up] in every shard, so sharding the full [gate;
up] regroups it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from rlpost.errors import WeightError
from rlpost.models.names import Dimensions, Layout
from rlpost.types import Bucket

GATED = ("gated", "fused_gated", "transposed_gated")
TRANSPOSED = ("transposed", "transposed_gated")
LINEAR = ("linear_qkv", "linear_qkvz", "linear_ba")


def merge(tensors: Sequence[torch.Tensor], layout: Layout, dims: Dimensions) -> torch.Tensor:
    """Full Hugging Face tensors -> the full Megatron tensor (without padding of the vocabulary)."""
    if layout == "qkv":
        tail = tensors[0].shape[1:]
        by_group = [tensor.reshape(dims.num_query_groups, -1, *tail) for tensor in tensors]
        return torch.cat(by_group, dim=1).reshape(-1, *tail)
    if layout == "gated_qkv":
        heads = tensors[0].unflatten(0, (-1, 2, dims.head_dim))
        query, gate = (heads[:, half].flatten(0, 1) for half in range(2))
        return merge([query, gate, *tensors[1:]], "qkv", dims)
    if layout in LINEAR:
        return _merge_by_key_head(tensors, layout, dims)
    if layout in TRANSPOSED:
        return tensors[0].mT
    if layout == "interleaved_gated":
        gate, up = tensors[0][..., ::2], tensors[0][..., 1::2]
        return torch.cat([gate, up], dim=-1).t()  # a vector stays as it is
    return torch.cat(list(tensors)) if layout == "gated" else tensors[0]


def split(tensor: torch.Tensor, layout: Layout, dims: Dimensions) -> tuple[torch.Tensor, ...]:
    """Split a full Megatron tensor into full, contiguous Hugging Face tensors.

    Padding of the vocabulary is removed.
    """
    if layout == "qkv":
        tail = tensor.shape[1:]
        groups = tensor.reshape(dims.num_query_groups, -1, *tail)
        num_query_rows = groups.size(1) - 2 * dims.head_dim
        parts = groups.split([num_query_rows, dims.head_dim, dims.head_dim], dim=1)
        return tuple(part.reshape(-1, *tail).contiguous() for part in parts)
    if layout == "gated":
        return tuple(part.contiguous() for part in tensor.chunk(2))
    if layout == "gated_qkv":
        return _split_gated_qkv(tensor, dims)
    if layout in LINEAR:
        return _split_by_key_head(tensor, layout, dims)
    if layout in TRANSPOSED:
        return (tensor.mT.contiguous(),)
    if layout == "interleaved_gated":
        gate, up = tensor.t().chunk(2, dim=-1)
        return (torch.stack([gate, up], dim=-1).flatten(-2),)
    return (tensor[: dims.vocab_size].contiguous() if layout == "vocabulary" else tensor,)


def shard(tensor: torch.Tensor, layout: Layout, *, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return the shard along ``dim`` of tensor-parallel ``rank`` of ``size``.

    The rows of a vocabulary are padded with zeros to a multiple of ``size``.

    Raises:
        WeightError: the dimension is not a multiple of ``size``.
    """
    if size == 1:
        return tensor
    if layout in GATED:
        return torch.cat([_part(half, 0, rank, size) for half in tensor.chunk(2)])
    if layout == "vocabulary":
        tensor = F.pad(tensor, (0, 0, 0, -tensor.size(0) % size))
    return _part(tensor, dim, rank, size)


def join(shards: Sequence[torch.Tensor], layout: Layout, *, dim: int) -> torch.Tensor:
    """The full Megatron tensor from the shards of all tensor-parallel ranks, in order."""
    if len(shards) == 1:
        return shards[0]
    if layout in GATED:
        halves = [part.chunk(2) for part in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(shards), dim=dim)


def _part(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    if tensor.size(dim) % size:
        raise WeightError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be sharded along dimension {dim} with "
            f"--tensor-model-parallel-size {size}; use a size that divides {tensor.size(dim)}"
        )
    return tensor.chunk(size, dim=dim)[rank]


def _split_gated_qkv(tensor: torch.Tensor, dims: Dimensions) -> tuple[torch.Tensor, ...]:
    groups = tensor.unflatten(0, (dims.num_query_groups, -1))
    width = dims.head_dim
    num_queries = (groups.size(1) - 2 * width) // 2
    parts = groups.split([num_queries, num_queries, width, width], dim=1)
    query, gate, key, value = (part.flatten(0, 1) for part in parts)
    heads = [part.unflatten(0, (-1, width)) for part in (query, gate)]
    return torch.stack(heads, dim=1).flatten(0, 2), key.contiguous(), value.contiguous()


def _rows_of_key_head(layout: Layout, dims: Dimensions) -> tuple[tuple[int, ...], ...]:
    """Rows of a key head, by kind, in each Hugging Face tensor of linear attention."""
    repeats = dims.linear_value_heads // dims.linear_key_heads
    values = repeats * dims.linear_value_dim
    qkv = (dims.linear_key_dim, dims.linear_key_dim, values)
    if layout == "linear_ba":
        return (repeats,), (repeats,)
    return (qkv, (values,)) if layout == "linear_qkvz" else (qkv,)


def _merge_by_key_head(
    tensors: Sequence[torch.Tensor], layout: Layout, dims: Dimensions
) -> torch.Tensor:
    count, by_head = dims.linear_key_heads, []
    for tensor, rows in zip(tensors, _rows_of_key_head(layout, dims), strict=True):
        kinds = tensor.split([count * each for each in rows])
        by_head += [kind.unflatten(0, (count, -1)) for kind in kinds]
    return torch.cat(by_head, dim=1).flatten(0, 1)


def _split_by_key_head(
    tensor: torch.Tensor, layout: Layout, dims: Dimensions
) -> tuple[torch.Tensor, ...]:
    rows = _rows_of_key_head(layout, dims)
    by_head = tensor.unflatten(0, (dims.linear_key_heads, -1))
    parts = []
    start = 0
    for group in rows:
        kinds = by_head.narrow(1, start, sum(group)).split(list(group), dim=1)
        parts.append(torch.cat([kind.flatten(0, 1) for kind in kinds]))
        start += sum(group)
    return tuple(parts)


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
