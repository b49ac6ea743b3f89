"""Inventory: all weights of the model, and the parts of them that this rank holds.

Input: this rank's model (one chunk per virtual pipeline stage), its family and its groups. Output:
``held``, the local parts, and ``entries``, the whole model in the same order on every rank.
Parameters are named as in an unsharded model: layers and experts are numbered over all ranks.
Buffers that a family names count as weights too. Adapters are not weights but updates of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from rlpost.models import names
from rlpost.models.family import Family
from rlpost.models.names import Dimensions, Rule
from rlpost.trainer.weights import layouts
from rlpost.trainer.weights.low_rank import LowRank, is_adapter

MTP_MARK = ".eh_proj."
"""Part of the name of one weight in each layer for multi-token prediction, and in no other layer.
"""
EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"
ENCODER = "vision_model."
"""Prefix of the trained weights of an encoder of images, which have transformers' names in it."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups over which a model is sharded."""

    tensor: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    expert: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    timeout: timedelta | None = None
    """Of a collective, for further groups; None is torch's default."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight of the model.

    For experts, one weight from each expert-parallel rank: those with the same local expert number.
    Where one Hugging Face tensor holds the weights of all experts, all of them.
    """

    rules: tuple[Rule, ...]  # one, or one for each expert-parallel rank, or one for each expert
    owner: int  # pipeline rank that holds it
    full_shape: tuple[int, ...]  # of the Megatron tensor, joined over the tensor-parallel ranks
    shapes: tuple[tuple[int, ...], ...]  # of all its Hugging Face tensors
    dtype: torch.dtype

    @property
    def hugging_face(self) -> tuple[str, ...]:
        """Names of all its tensors."""
        if self.is_stacked:
            return self.rules[0].hugging_face
        return tuple(name for rule in self.rules for name in rule.hugging_face)

    @property
    def is_stacked(self) -> bool:
        """Whether one tensor holds the weights of all experts."""
        return self.rules[0].is_stacked

    @property
    def num_bytes(self) -> int:
        """Bytes of all its Hugging Face tensors."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's shard of a weight."""

    tensor: torch.Tensor
    rule: Rule
    group: dist.ProcessGroup  # the ranks that hold the shards
    dim: int | None  # sharded dimension; None if not sharded
    low_rank: LowRank | None = None  # update by an adapter; ``tensor`` is without it

    @property
    def value(self) -> torch.Tensor:
        """The weight, of any shape, of the model: ``tensor``, or a new one with the update."""
        return self.tensor.detach() if self.low_rank is None else self.low_rank.merged(self.tensor)


Gather = Callable[[list[Entry], dist.ProcessGroup], list[list[Entry]]]
"""Exchanges the entries of all ranks of a group; returns them by rank. Collective of the group."""


def gather_entries(mine: list[Entry], group: dist.ProcessGroup) -> list[list[Entry]]:
    """Exchange entries over the process group."""
    if group.size() == 1:
        return [mine]
    everyone: list[list[Entry]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gather a tensor of any shape, equal on all ranks, from each rank of a group. Collective."""
    gathered = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered


class Inventory:
    """All weights of the model, and this rank's shards.

    Construction is collective in the pipeline group.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        *,
        family: Family,
        dims: Dimensions,
        groups: Groups,
        tied: bool,
        low_rank: Mapping[torch.Tensor, LowRank] | None = None,
        gather: Gather = gather_entries,
    ) -> None:
        """List the weights of all pipeline stages.

        ``tied``: the output layer is the embedding. ``low_rank`` has the adapters by weight, and
        ``gather`` exchanges entries between pipeline stages.

        Raises:
            WeightError: the family has no rule for a parameter.
        """
        self.dims = dims
        self.groups = groups
        self.tied = tied
        self.family = family
        self.held: dict[str, Held] = {}
        mine: list[Entry] = []
        for name, tensor in named_tensors(chunks):
            is_copy = tied and name == OUTPUT_LAYER  # of the embedding, on the last pipeline stage
            held = self._held(name, tensor, family, is_copy=is_copy)
            held = replace(held, low_rank=(low_rank or {}).get(tensor))
            self.held[held.rule.megatron] = held
            if not is_copy and not (held.rule.is_stacked and names.expert_number(name)):
                mine.append(self._entry(name, held, family))
        self.entries = in_order(gather(mine, groups.pipeline))

    @property
    def device(self) -> torch.device:
        return next(iter(self.held.values())).tensor.device

    @property
    def hugging_face(self) -> set[str]:
        """Hugging Face names of all tensors of the model."""
        return {name for entry in self.entries for name in entry.hugging_face}

    @property
    def num_layers(self) -> int:
        """Number of layers, including a trained layer for multi-token prediction."""
        return 1 + max(names.layer_number(entry.rules[0].megatron) or 0 for entry in self.entries)

    @property
    def mtp_layers(self) -> frozenset[int]:
        """Layer numbers of the trained layers for multi-token prediction."""
        found = (entry.rules[0].megatron for entry in self.entries)
        numbers = [names.layer_number(name) for name in found if MTP_MARK in name]
        return frozenset(number for number in numbers if number is not None)

    def part(self, entry: Entry) -> Held | None:
        """Return this rank's shard of an entry; None if there is none."""
        rule = entry.rules[self.groups.expert.rank()] if len(entry.rules) > 1 else entry.rules[0]
        return self.held.get(rule.megatron)

    def parts(self, entry: Entry) -> list[Held]:
        """Return this rank's experts of a stacked entry, in order; empty without."""
        first = self._first_expert(self.groups.expert.rank())
        last = self._first_expert(self.groups.expert.rank() + 1)
        found = (self.held.get(rule.megatron) for rule in entry.rules[first:last])
        return [held for held in found if held is not None]

    def _held(self, name: str, tensor: torch.Tensor, family: Family, *, is_copy: bool) -> Held:
        expert = names.expert_number(name)
        if expert is not None:
            name = names.renumber(
                name, expert=self._first_expert(self.groups.expert.rank()) + expert
            )
        group = self.groups.tensor if expert is None else self.groups.expert_tensor
        is_sharded = getattr(tensor, "tensor_model_parallel", False) and group.size() > 1
        dim = tensor.partition_dim if is_sharded else None
        rule = _rule(EMBEDDING if is_copy else name, family)
        return Held(tensor, replace(rule, megatron=name), group, dim)

    def _entry(self, name: str, held: Held, family: Family) -> Entry:
        expert = names.expert_number(name)
        rules: tuple[names.Rule, ...] = (held.rule,)
        if expert is not None:
            everyone = range(self.groups.expert.size())
            numbers = [self._first_expert(rank) + expert for rank in everyone]
            if held.rule.is_stacked:
                numbers = list(range(self.dims.num_experts))
            rules = names.of_experts(name, numbers, family.rules)
        num_shards = 1 if held.dim is None else held.group.size()
        full_shape, shapes = _full_shapes(
            held.tensor.shape, held.rule.layout, held.dim or 0, num_shards, self.dims
        )
        if held.rule.is_stacked:
            shapes = tuple((len(rules), *shape) for shape in shapes)
        else:
            shapes *= len(rules)
        return Entry(rules, self.groups.pipeline.rank(), full_shape, shapes, held.tensor.dtype)

    def _first_expert(self, expert_rank: int) -> int:
        return self.dims.num_experts // self.groups.expert.size() * expert_rank


def _rule(name: str, family: Family) -> Rule:
    if not name.startswith(ENCODER):
        return names.to_hugging_face(name, family.rules)
    assert family.vision is not None, "it has the encoder"
    return Rule(name, (family.vision.prefix + name.removeprefix(ENCODER),))


@lru_cache(maxsize=1024)
def _full_shapes(
    shape: torch.Size, layout: names.Layout, dim: int, num_shards: int, dims: Dimensions
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Shapes of the full Megatron tensor, and of its Hugging Face tensors, from that of a shard.

    Cached, because a model has thousands of weights and few shapes.
    """
    shards = [torch.empty(shape, device="meta")] * num_shards
    full = layouts.join(shards, layout, dim=dim)
    parts = layouts.split(full, layout, dims)
    return tuple(full.shape), tuple(tuple(part.shape) for part in parts)


def in_order(stages: Sequence[Sequence[Entry]]) -> tuple[Entry, ...]:
    """Sort the entries of all pipeline stages: embedding, layers in order, then all others.

    Within a layer ``names.LOADED_TOGETHER`` come first and the experts last, grouped by expert. The
    order does not depend on Megatron's module for experts.
    """
    entries = [entry for stage in stages for entry in stage]

    def place(entry: Entry) -> tuple[float, int, str, int]:
        name = entry.rules[0].megatron
        number, expert = names.layer_number(name), names.expert_number(name)
        if number is not None:
            return number, -1 if expert is None else expert, "", names.place_in_layer(name)
        module = names.mtp_module(name) or ""
        return -1 if name == EMBEDDING else float("inf"), -1, module, names.place_in_layer(name)

    return tuple(sorted(entries, key=place))


def named_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all weights by canonical name, with layers numbered over the whole model.

    These are all parameters except adapters, and expert biases. Megatron's ``layer_number`` starts
    at 1.
    """
    for chunk in chunks:
        buffers = (
            (name, buffer)
            for name, buffer in chunk.named_buffers()
            if name.endswith(".expert_bias")
        )
        for name, tensor in (*chunk.named_parameters(), *buffers):
            if is_adapter(name):
                continue
            local, mtp = names.layer_number(name), names.mtp_module(name)
            if mtp is not None:
                name = names.as_decoder_layer(
                    name, chunk.get_submodule(f"{mtp}.transformer_layer").layer_number - 1
                )
            elif local is not None:
                layer = chunk.get_submodule(f"decoder.layers.{local}")
                name = names.renumber(name, layer=layer.layer_number - 1)
            yield names.canonical(name), tensor
