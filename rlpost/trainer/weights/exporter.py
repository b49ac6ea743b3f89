"""Gather the Megatron model as Hugging Face tensors in buckets.

Input: the inventory of this rank. Output: full tensors under Hugging Face names, at every layout.
The plan depends only on shapes and is the same on every rank; data is gathered one bucket at a
time. Invariant: import and export are bitwise inverses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from rlpost.config.plan.weight_update import Travelling, deal
from rlpost.models.fp8 import SUFFIX
from rlpost.models.names import LOADED_TOGETHER
from rlpost.trainer.weights import layouts
from rlpost.trainer.weights.inventory import Entry, Held, Inventory, all_gather
from rlpost.trainer.weights.layouts import num_bytes, pack, unpack
from rlpost.trainer.weights.quantise import FP8, BlockFp8, quantise, scale_shape
from rlpost.types import Bucket

T = TypeVar("T")


def must_follow(entries: Sequence[Entry]) -> list[bool]:
    """For each entry, whether it must be in the bucket of the one before it."""
    found = [entry.rules[0].megatron for entry in entries]
    first, second = LOADED_TOGETHER
    pairs = zip(["", *found], found, strict=False)
    return [name.endswith(second) and before.endswith(first) for before, name in pairs]


class Exporter:
    """The full tensors of the model, bucket by bucket."""

    def __init__(self, inventory: Inventory) -> None:
        """Create an exporter; all ranks of a model replica must call ``gather`` together."""
        self.inventory = inventory

    def plan(
        self, max_bytes: int, *, quantisation: BlockFp8 | None = None
    ) -> tuple[tuple[Entry, ...], ...]:
        """All weights, by pipeline stage, in buckets of at most ``max_bytes``.

        A larger weight is alone in its bucket. The weights of a bucket are of one stage;
        ``names.LOADED_TOGETHER`` are in one bucket. With ``quantisation`` bytes are counted in FP8.
        """
        entries = self.inventory.entries
        weights = [
            Travelling(entry.owner, sent_bytes(entry, quantisation), joins)
            for entry, joins in zip(entries, must_follow(entries), strict=True)
        ]
        buckets = []
        for bucket in deal(weights, max_bytes):
            buckets.append(tuple(entries[index] for index in bucket))
        return tuple(buckets)

    @torch.no_grad()
    def gather(
        self,
        bucket: tuple[Entry, ...],
        *,
        on_all_stages: bool = True,
        quantisation: BlockFp8 | None = None,
        gets_tensors: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Full Hugging Face tensors of a bucket, on the device. Collective.

        Args:
            bucket: from ``plan``.
            on_all_stages: without it only the bucket's pipeline stage calls and gets the tensors.
            quantisation: quantises the tensors.
            gets_tensors: false for a rank that takes part for others; it gets no tensors.
        """
        tensors: dict[str, torch.Tensor] = {}
        for entry in bucket:
            if quantisation is not None and quantisation.names >= set(entry.hugging_face):
                tensors |= gather_quantised(
                    self.inventory,
                    entry,
                    quantisation,
                    on_all_stages=on_all_stages,
                    gets_tensors=gets_tensors,
                )
            elif entry.is_stacked:
                stacked = self._stacked(entry, on_all_stages)
                if gets_tensors:
                    tensors[entry.hugging_face[0]] = stacked
            else:
                fulls = self._full(entry, on_all_stages)
                if gets_tensors:
                    tensors |= self._split(entry, fulls, quantisation)
        return tensors

    def _split(
        self, entry: Entry, fulls: Sequence[torch.Tensor], quantisation: BlockFp8 | None
    ) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of an entry's full Megatron tensors."""
        tensors: dict[str, torch.Tensor] = {}
        for rule, full in zip(entry.rules, fulls, strict=True):
            parts = layouts.split(full, rule.layout, self.inventory.dims)
            for name, part in zip(rule.hugging_face, parts, strict=True):
                tensors |= (
                    {name: part} if quantisation is None else quantisation.tensors(name, part)
                )
        return tensors

    def _stacked(self, entry: Entry, on_all_stages: bool) -> torch.Tensor:
        """Gather the Hugging Face tensor that holds a weight of all experts.

        Each expert is gathered from the ranks that share it. Those of this rank are stacked, then
        gathered from the expert-parallel ranks, then sent to the other stages.
        """
        groups, layout = self.inventory.groups, entry.rules[0].layout
        if held := self.inventory.parts(entry):
            parts = [
                layouts.split(gather_whole(one), layout, self.inventory.dims)[0] for one in held
            ]
            stacked = torch.cat(all_gather(torch.stack(parts), groups.expert))
        else:
            stacked = torch.empty(entry.shapes[0], dtype=entry.dtype, device=self.inventory.device)
        if groups.pipeline.size() > 1 and on_all_stages:
            dist.broadcast(stacked, group=groups.pipeline, group_src=entry.owner)
        return stacked

    def _full(self, entry: Entry, on_all_stages: bool) -> Sequence[torch.Tensor]:
        """Full Megatron tensors of an entry.

        Gathers from the tensor-parallel ranks of its stage, then from the expert-parallel ranks,
        then broadcasts to the other stages.
        """
        groups, held = self.inventory.groups, self.inventory.part(entry)
        if held is not None:
            full = gather_whole(held)
            fulls = [full] if len(entry.rules) == 1 else all_gather(full, groups.expert)
        if groups.pipeline.size() == 1 or not on_all_stages:
            return fulls
        if held is None:
            device = self.inventory.device
            fulls = [
                torch.empty(entry.full_shape, dtype=entry.dtype, device=device) for _ in entry.rules
            ]
        fulls = [full.contiguous() for full in fulls]
        for full in fulls:
            dist.broadcast(full, group=groups.pipeline, group_src=entry.owner)
        return fulls


def gather_whole(held: Held) -> torch.Tensor:
    """Gather a Megatron tensor, of any shape, from the ranks that hold its shards.

    Collective of these.
    """
    shards = [held.value] if held.dim is None else all_gather(held.value, held.group)
    return layouts.join(shards, held.rule.layout, dim=held.dim or 0)


def sent_tensors(
    entry: Entry, quantisation: BlockFp8 | None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors that are sent for an entry: name -> (shape, torch's name of the dtype)."""
    dtype = str(entry.dtype).removeprefix("torch.")
    made: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in zip(entry.hugging_face, entry.shapes, strict=True):
        made.update(
            {name: (shape, dtype)}
            if quantisation is None
            else quantisation.shapes(name, shape, dtype)
        )
    return made


def sent_bytes(entry: Entry, quantisation: BlockFp8 | None) -> int:
    """Bytes of all tensors that are sent for an entry."""
    if quantisation is None:
        return entry.num_bytes
    made = sent_tensors(entry, quantisation).values()
    return sum(num_bytes(shape, getattr(torch, dtype)) for shape, dtype in made)


def describe(bucket: tuple[Entry, ...], quantisation: BlockFp8 | None = None) -> Bucket:
    """Names, shapes and dtypes of a bucket for the engine; larger elements first."""
    made: dict[str, tuple[tuple[int, ...], str]] = {}
    for entry in bucket:
        made.update(sent_tensors(entry, quantisation))
    # stable: equal sizes stay in order
    names = sorted(made, key=lambda name: -getattr(torch, made[name][1]).itemsize)
    shapes, dtypes = zip(*(made[name] for name in names), strict=True)
    return Bucket(tuple(names), shapes, dtypes, bucket[0].owner)


Shape = tuple[int, ...]
Parts = list[torch.Tensor]
"""For all Hugging Face tensors of one rule: the scales of each, then the values of each."""


def gather_quantised(
    inventory: Inventory,
    entry: Entry,
    quantisation: BlockFp8,
    *,
    on_all_stages: bool,
    gets_tensors: bool = True,
) -> Mapping[str, torch.Tensor]:
    """Gather and quantise the tensors of an entry. Collective, as ``Exporter.gather``.

    Bitwise equal to quantising the full tensors. If a shard consists of whole blocks, each rank
    quantises it before the gather, which halves the bytes; otherwise the tensor-parallel ranks
    gather in the trainer's precision. Bytes are gathered, because gloo has no FP8 dtypes.

    Returns:
        The tensors by name, with the shapes of ``BlockFp8.shapes``; empty unless ``gets_tensors``.
    """
    groups, held = inventory.groups, inventory.part(entry)
    shapes = entry.shapes[: len(entry.rules[0].hugging_face)]
    likes = _likes(shapes, quantisation.block)
    goes_to_stages = groups.pipeline.size() > 1 and on_all_stages
    is_needed = gets_tensors or goes_to_stages or len(entry.rules) > 1
    packed: list[torch.Tensor] = []
    if held is not None:
        parts = _of_one_rule(inventory, held, shapes, quantisation, is_needed=is_needed)
        if parts is None:
            return {}
        packed_parts = pack(parts)
        packed = (
            [packed_parts] if len(entry.rules) == 1 else all_gather(packed_parts, groups.expert)
        )
    if goes_to_stages:
        if held is None:
            size, device = sum(num_bytes(*like) for like in likes), inventory.device
            packed = [torch.empty(size, dtype=torch.uint8, device=device) for _ in entry.rules]
        for flat in packed:
            dist.broadcast(flat, group=groups.pipeline, group_src=entry.owner)
    tensors: dict[str, torch.Tensor] = {}
    if not gets_tensors:
        return tensors
    for rule, flat in zip(entry.rules, packed, strict=True):
        parts, count = unpack(flat, likes), len(shapes)
        for name, scales, values in zip(
            rule.hugging_face, parts[:count], parts[count:], strict=True
        ):
            tensors |= {name: values, name + SUFFIX: scales}
    return tensors


def shards_are_whole_blocks(
    held: Held, shapes: tuple[Shape, ...], block: tuple[int, int], *, num_query_groups: int
) -> bool:
    """Return whether each rank's shard of each Hugging Face tensor consists of whole blocks."""
    if held.dim is None:
        return True
    dim, size, layout = held.dim, held.group.size(), held.rule.layout
    if layout not in ("plain", "qkv", "gated"):
        return False  # a shard's rows are not contiguous in the full tensor, or are padded
    if layout == "qkv" and num_query_groups % size:
        return False
    return all(shape[dim] % (size * block[dim]) == 0 for shape in shapes)


def _of_one_rule(
    inventory: Inventory,
    held: Held,
    shapes: tuple[Shape, ...],
    quantisation: BlockFp8,
    *,
    is_needed: bool,
) -> Parts | None:
    """Gather from the tensor-parallel ranks; return None if the result is not needed."""
    local, block, groups = held.value, quantisation.block, inventory.dims.num_query_groups
    if held.dim is None:
        if not is_needed:
            return None
        return _quantised(layouts.split(local, held.rule.layout, inventory.dims), quantisation)
    if not shards_are_whole_blocks(held, shapes, block, num_query_groups=groups):
        shards = all_gather(local, held.group)
        if not is_needed:
            return None
        full = layouts.join(shards, held.rule.layout, dim=held.dim)
        return _quantised(layouts.split(full, held.rule.layout, inventory.dims), quantisation)
    size = held.group.size()
    dims = replace(inventory.dims, num_query_groups=groups // size)
    packed = pack(_quantised(layouts.split(local, held.rule.layout, dims), quantisation))
    flats = all_gather(packed, held.group)
    if not is_needed:
        return None
    likes = _likes(tuple(_shard_shape(shape, held.dim, size) for shape in shapes), block)
    unpacked = [unpack(flat, likes) for flat in flats]
    return [_joined(parts, held.dim) for parts in zip(*unpacked, strict=True)]


def _quantised(tensors: tuple[torch.Tensor, ...], quantisation: BlockFp8) -> Parts:
    block, powers = quantisation.block, quantisation.has_powers_of_two
    pairs = [quantise(tensor, block, has_powers_of_two=powers) for tensor in tensors]
    return [scales for _, scales in pairs] + [values for values, _ in pairs]


def _likes(shapes: tuple[Shape, ...], block: tuple[int, int]) -> list[tuple[Shape, torch.dtype]]:
    scales = [(scale_shape(shape, block), torch.float32) for shape in shapes]
    return [*scales, *((shape, FP8) for shape in shapes)]


def _shard_shape(shape: Shape, dim: int, size: int) -> Shape:
    return tuple(length // size if at == dim else length for at, length in enumerate(shape))


def _joined(parts: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    """Concatenate the shards of a tensor.

    FP8 is concatenated as bytes, because not every backend supports it.
    """
    if parts[0].dtype != FP8:
        return torch.cat(parts, dim=dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim=dim).view(FP8)
