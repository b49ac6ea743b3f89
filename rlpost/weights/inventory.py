"""Inventory: all weights of the model, and the parts of them that this rank holds.

Input: this rank's model (one chunk per virtual pipeline stage), its family and its groups. Output:
``held``, the local parts, and ``entries``, the whole model in the same order on every rank. Parameters
are named as in an unsharded model: layers and experts are numbered over all ranks. Buffers that a
family names count as weights too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from rlpost.weights import layouts, names
from rlpost.weights.family import Family
from rlpost.weights.names import Dimensions, Rule

MTP_MARK = ".eh_proj."
"""In the name of one weight of each layer for multi-token prediction, and of no other layer's."""
EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Groups:
    """Among whom a model is cut, as process groups."""

    tensor: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    expert: dist.ProcessGroup
    pipeline: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight of the model; an expert's weight with those at the same place of all expert-parallel ranks."""

    rules: tuple[Rule, ...]  # one, or one for each expert-parallel rank
    owner: int  # pipeline rank that holds it
    full_shape: tuple[int, ...]  # of the Megatron tensor, joined over the tensor-parallel ranks
    shapes: tuple[tuple[int, ...], ...]  # of all its Hugging Face tensors
    dtype: torch.dtype

    @property
    def hugging_face(self) -> tuple[str, ...]:
        """Names of all its tensors."""
        return tuple(name for rule in self.rules for name in rule.hugging_face)

    @property
    def num_bytes(self) -> int:
        """Of all its Hugging Face tensors."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's part of a weight."""

    tensor: torch.Tensor
    rule: Rule
    group: dist.ProcessGroup  # whose ranks hold the other parts
    dim: int | None  # along which it is cut; None when it is whole


Gather = Callable[[list[Entry], dist.ProcessGroup], list[list[Entry]]]
"""The entries of every rank of a group, in order, from those of this rank. A collective of the group."""


def gather_entries(mine: list[Entry], group: dist.ProcessGroup) -> list[list[Entry]]:
    """Exchange entries over the process group."""
    if group.size() == 1:
        return [mine]
    everyone: list[list[Entry]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


class Inventory:
    """What there is and what is here. Constructing it is a collective of the pipeline group."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        *,
        family: Family,
        dims: Dimensions,
        groups: Groups,
        tied: bool,
        gather: Gather = gather_entries,
    ) -> None:
        """Args: ``tied``: whether the output layer is the embedding; ``gather``: how the pipeline stages exchange their
        entries. Raises WeightError for a parameter that the family has no name for."""
        self.dims = dims
        self.groups = groups
        self.tied = tied
        self.carries_extra_layers = family.carries_extra_layers
        self.held: dict[str, Held] = {}
        mine: list[Entry] = []
        for name, tensor in _tensors(chunks):
            is_copy = tied and name == OUTPUT_LAYER  # of the embedding, on the last pipeline stage
            held = self._held(name, tensor, family, is_copy=is_copy)
            self.held[held.rule.megatron] = held
            if not is_copy:
                mine.append(self._entry(name, held, family))
        self.entries = in_order(gather(mine, groups.pipeline))

    @property
    def hugging_face(self) -> set[str]:
        """The names of all tensors of the model."""
        return {name for entry in self.entries for name in entry.hugging_face}

    @property
    def num_layers(self) -> int:
        """Layers of the model, one for multi-token prediction included where it is trained."""
        return 1 + max(names.layer_number(entry.rules[0].megatron) or 0 for entry in self.entries)

    @property
    def mtp_layers(self) -> frozenset[int]:
        """Numbers of the layers for multi-token prediction among those of the model."""
        marked = (entry.rules[0].megatron for entry in self.entries if MTP_MARK in entry.rules[0].megatron)
        return frozenset(number for name in marked if (number := names.layer_number(name)) is not None)

    def part(self, entry: Entry) -> Held | None:
        """What this rank holds of an entry."""
        rule = entry.rules[self.groups.expert.rank()] if len(entry.rules) > 1 else entry.rules[0]
        return self.held.get(rule.megatron)

    def _held(self, name: str, tensor: torch.Tensor, family: Family, *, is_copy: bool) -> Held:
        expert = names.expert_number(name)
        if expert is not None:
            name = names.renumber(name, expert=self._first_expert(self.groups.expert.rank()) + expert)
        group = self.groups.tensor if expert is None else self.groups.expert_tensor
        dim = tensor.partition_dim if getattr(tensor, "tensor_model_parallel", False) and group.size() > 1 else None
        rule = names.to_hugging_face(EMBEDDING if is_copy else name, family.rules)
        return Held(tensor, replace(rule, megatron=name), group, dim)

    def _entry(self, name: str, held: Held, family: Family) -> Entry:
        expert = names.expert_number(name)
        rules: tuple[names.Rule, ...] = (held.rule,)
        if expert is not None:
            everyone = range(self.groups.expert.size())
            numbers = [self._first_expert(rank) + expert for rank in everyone]
            rules = tuple(names.to_hugging_face(names.renumber(name, expert=n), family.rules) for n in numbers)
        shards = [torch.empty(held.tensor.shape, device="meta")] * (1 if held.dim is None else held.group.size())
        full = layouts.join(shards, held.rule.layout, dim=held.dim or 0)
        shapes = tuple(tuple(part.shape) for part in layouts.split(full, held.rule.layout, self.dims))
        return Entry(rules, self.groups.pipeline.rank(), tuple(full.shape), shapes * len(rules), held.tensor.dtype)

    def _first_expert(self, expert_rank: int) -> int:
        return self.dims.num_experts // self.groups.expert.size() * expert_rank


def in_order(stages: Sequence[Sequence[Entry]]) -> tuple[Entry, ...]:
    """The entries of all pipeline stages: the embedding, the layers in order, then what follows them. Within a layer
    the experts come last and each one's weights together, whichever of Megatron's modules for experts it is."""
    entries = [entry for stage in stages for entry in stage]

    def place(entry: Entry) -> tuple[float, int]:
        name = entry.rules[0].megatron
        number, expert = names.layer_number(name), names.expert_number(name)
        if number is not None:
            return number, -1 if expert is None else expert
        return -1 if name == EMBEDDING else float("inf"), -1

    return tuple(sorted(entries, key=place))


def _tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and expert biases under their canonical names, with layers counted over the whole model (a layer knows
    its number from 1)."""
    for chunk in chunks:
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))
        for name, tensor in (*chunk.named_parameters(), *buffers):
            local, mtp = names.layer_number(name), names.mtp_module(name)
            if mtp is not None:
                name = names.as_decoder_layer(name, chunk.get_submodule(f"{mtp}.transformer_layer").layer_number - 1)
            elif local is not None:
                layer = chunk.get_submodule(f"decoder.layers.{local}")
                name = names.renumber(name, layer=layer.layer_number - 1)
            yield names.canonical(name), tensor
