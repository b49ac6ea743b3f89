"""Gather a weight in FP8 from ranks that hold shards of it: quantised first, where that makes no difference.

Input: an entry of the inventory whose tensors all travel in FP8. Output: values and scales of its full tensors, equal
bit by bit to those of the full tensors quantised. A shard can be quantised on its own where it begins and ends with a
block; then FP8 travels between the ranks of the trainer, half the bytes. Where it does not, the tensor-parallel ranks
gather the trainer's precision and quantise what they have; further on FP8 travels as well.

Bytes are gathered, because gloo knows no dtype of FP8; NCCL copies them just as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from rlpost.weights import layouts
from rlpost.weights.flat import num_bytes, pack, unpack
from rlpost.weights.inventory import Entry, Held, Inventory
from rlpost.weights.quantise import FP8, BlockFp8, quantise, scale_shape

Shape = tuple[int, ...]
Parts = list[torch.Tensor]
"""Of the Hugging Face tensors of one rule: the scales of each, then the values of each."""


def gather_quantised(
    inventory: Inventory, entry: Entry, quantisation: BlockFp8, *, on_all_stages: bool, wanted: bool = True
) -> Mapping[str, torch.Tensor]:
    """All tensors of an entry by name, as ``BlockFp8.shapes`` says; none unless ``wanted``. A collective, see
    ``Exporter.gather``."""
    groups, held = inventory.groups, inventory.part(entry)
    shapes = entry.shapes[: len(entry.rules[0].hugging_face)]
    likes = _likes(shapes, quantisation.block)
    goes_to_stages = groups.pipeline.size() > 1 and on_all_stages
    is_needed = wanted or goes_to_stages or len(entry.rules) > 1
    packed: list[torch.Tensor] = []
    if held is not None:
        parts = _of_one_rule(inventory, held, shapes, quantisation, is_needed=is_needed)
        if parts is None:
            return {}
        own = pack(parts)
        packed = [own] if len(entry.rules) == 1 else all_gather(own, groups.expert)
    if goes_to_stages:
        if held is None:
            device = next(iter(inventory.held.values())).tensor.device
            size = sum(num_bytes(shape, dtype) for shape, dtype in likes)
            packed = [torch.empty(size, dtype=torch.uint8, device=device) for _ in entry.rules]
        for flat in packed:
            dist.broadcast(flat, group=groups.pipeline, group_src=entry.owner)
    tensors: dict[str, torch.Tensor] = {}
    if not wanted:
        return tensors
    for rule, flat in zip(entry.rules, packed, strict=True):
        parts, count = unpack(flat, likes), len(shapes)
        for name, scales, values in zip(rule.hugging_face, parts[:count], parts[count:], strict=True):
            tensors |= quantisation.named(name, values, scales)
    return tensors


def shards_are_whole_blocks(
    held: Held, shapes: tuple[Shape, ...], block: tuple[int, int], *, num_query_groups: int
) -> bool:
    """Whether each rank's shard of each Hugging Face tensor begins and ends with a block."""
    if held.dim is None:
        return True
    dim, size, layout = held.dim, held.group.size(), held.rule.layout
    if layout not in ("plain", "qkv", "gated"):
        return False  # rows of a shard that do not lie together in the full tensor, or are padded
    if layout == "qkv" and num_query_groups % size:
        return False
    return all(shape[dim] % (size * block[dim]) == 0 for shape in shapes)


def _of_one_rule(
    inventory: Inventory, held: Held, shapes: tuple[Shape, ...], quantisation: BlockFp8, *, is_needed: bool
) -> Parts | None:
    """The full tensors of all tensor-parallel ranks; None, after the collective, where they are not needed."""
    local, block, groups = held.tensor.detach(), quantisation.block, inventory.dims.num_query_groups
    if held.dim is None:
        return _quantised(layouts.split(local, held.rule.layout, inventory.dims), block) if is_needed else None
    if not shards_are_whole_blocks(held, shapes, block, num_query_groups=groups):
        shards = all_gather(local, held.group)
        if not is_needed:
            return None
        full = layouts.join(shards, held.rule.layout, dim=held.dim)
        return _quantised(layouts.split(full, held.rule.layout, inventory.dims), block)
    size = held.group.size()
    dims = replace(inventory.dims, num_query_groups=groups // size)
    own = pack(_quantised(layouts.split(local, held.rule.layout, dims), block))
    flats = all_gather(own, held.group)
    if not is_needed:
        return None
    likes = _likes(tuple(_cut(shape, held.dim, size) for shape in shapes), block)
    of_ranks = [unpack(flat, likes) for flat in flats]
    return [_joined(parts, held.dim) for parts in zip(*of_ranks, strict=True)]


def _quantised(tensors: tuple[torch.Tensor, ...], block: tuple[int, int]) -> Parts:
    pairs = [quantise(tensor, block) for tensor in tensors]
    return [scales for _, scales in pairs] + [values for values, _ in pairs]


def _likes(shapes: tuple[Shape, ...], block: tuple[int, int]) -> list[tuple[Shape, torch.dtype]]:
    scales = [(scale_shape(shape, block), torch.float32) for shape in shapes]
    return [*scales, *((shape, FP8) for shape in shapes)]


def _cut(shape: Shape, dim: int, size: int) -> Shape:
    return tuple(length // size if at == dim else length for at, length in enumerate(shape))


def _joined(parts: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    """Shards of one tensor in order; FP8 as bytes, which torch can concatenate everywhere."""
    if parts[0].dtype != FP8:
        return torch.cat(parts, dim=dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim=dim).view(FP8)


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all ranks of a group, which have one shape. A collective."""
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered
