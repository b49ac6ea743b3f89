"""What this rank can send of the weights: regions of its shards, and the elements of a box.

Input: the inventory of this rank. Output: ``units``, the tensors that are sent, the same on every
rank; ``regions``, what this rank holds of them; ``read``, the elements of a box.

Nearly all regions are views of this rank's shards. Some tensors are computed first: FP8 values and
scales, and layouts that move single elements. If the shards do not consist of whole blocks, the
tensor-parallel ranks gather the weight, and one of them computes all of it; they take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from rlpost.config.plan.shard_plan import SentTensor, Unit
from rlpost.models import names
from rlpost.models.fp8 import SUFFIX
from rlpost.models.layout_rows import WITHOUT_ROWS, Shard, shard_regions
from rlpost.models.names import Rule
from rlpost.models.regions import Box, Region, contiguous
from rlpost.trainer.weights import layouts
from rlpost.trainer.weights.exporter import must_follow, shards_are_whole_blocks
from rlpost.trainer.weights.inventory import Entry, Held, Inventory
from rlpost.trainer.weights.quantise import FP8, BlockFp8, scale_shape

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Own:
    """A weight of this rank, and the shapes of its Hugging Face tensors.

    ``expert``: its index in the first dimension of a tensor that holds all experts, which the
    shapes are without; None elsewhere.
    """

    held: Held
    shapes: tuple[Shape, ...]
    expert: int | None

    @property
    def rule(self) -> Rule:
        return self.held.rule


@dataclass(frozen=True, slots=True)
class _Computed:
    """Tensors that are computed from a weight of this rank before they are sent."""

    own: _Own
    is_gathered: bool
    """Whether the ranks of the weight's group gather it."""
    is_mine: bool
    """Whether this rank has the result."""


class ShardSources:
    """The weights of this rank as a source of boxes."""

    def __init__(
        self, inventory: Inventory, quantisation: BlockFp8 | None, *, gathers: bool
    ) -> None:
        """``gathers``: this rank's replica gathers the weights that have to be gathered."""
        self.inventory = inventory
        self.quantisation = quantisation
        self.units = tuple(_units(inventory, quantisation))
        self.regions: list[Region] = []
        self._computed: dict[str, list[_Computed]] = {}
        """By each of their tensors."""
        self._results: dict[str, torch.Tensor] = {}
        """The computed tensors of the current bucket, flat, by the parameter of their regions."""
        self._shards: torch.Tensor | None = None
        """Memory for the shards of a weight that is gathered."""
        self._gathers = gathers
        self._num_gathered = 0
        for entry in inventory.entries:
            for entry_slice in self._own(entry):
                self._add(entry_slice)
        self._by_tensor: dict[str, list[Region]] = {}
        for region in self.regions:
            self._by_tensor.setdefault(region.tensor, []).append(region)

    @property
    def gathered(self) -> frozenset[str]:
        """Tensors for which this rank takes part in gathering a weight."""
        return frozenset(
            name
            for name, parts in self._computed.items()
            if any(part.is_gathered for part in parts)
        )

    def reserve(self) -> None:
        """Allocate what ``prepare`` gathers into; after that no rank fails before a gather."""
        parts = [part for parts in self._computed.values() for part in parts if part.is_gathered]
        sizes = [part.own.held.group.size() * part.own.held.tensor.nbytes for part in parts]
        if sizes:
            device = self.inventory.device
            self._shards = torch.empty(max(sizes), dtype=torch.uint8, device=device)

    @torch.no_grad()
    def prepare(self, tensors: Sequence[str]) -> None:
        """Compute those of a bucket's ``tensors`` that have to be computed.

        Collective of the tensor-parallel ranks for the tensors in ``gathered``: call it with these
        in the same order on all of them. What fails on this rank is raised at the end, because the
        others wait for it in the gathers.
        """
        if self._shards is None:
            self.reserve()
        self._results.clear()
        done: set[int] = set()
        failure: Exception | None = None
        for name in tensors:
            for part in self._computed.get(name, ()):
                if id(part) in done:
                    continue
                done.add(id(part))
                try:
                    self._results |= self._compute(part)
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    @torch.no_grad()
    def read(self, box: Box) -> torch.Tensor:
        """The elements [*box.size] of a box that this rank holds, as a view where possible.

        FP8 values are returned as bytes. Raises KeyError if this rank does not hold all of it.
        """
        for region in self._by_tensor.get(box.tensor, ()):
            if region.box.intersect(box) == box:
                place = region.narrow(box)
                flat = self._flat(region.parameter)
                # Megatron keeps parameters in common buffers.
                offset = flat.storage_offset() + place.offset
                return flat.as_strided(place.size, place.strides, offset)
        raise KeyError(box)

    def release(self) -> None:
        """Free the computed tensors."""
        self._results.clear()
        self._shards = None

    def _flat(self, parameter: str) -> torch.Tensor:
        if parameter in self._results:
            return self._results[parameter]
        held = self.inventory.held[parameter]
        flat = held.value.contiguous().view(-1)
        if held.low_rank is not None:
            self._results[parameter] = flat
        return flat

    def _own(self, entry: Entry) -> Iterator[_Own]:
        if entry.is_stacked:
            for held in self.inventory.parts(entry):
                expert = names.expert_number(held.rule.megatron)
                yield _Own(held, (entry.shapes[0][1:],), expert)
        elif (part := self.inventory.part(entry)) is not None:
            yield _Own(part, entry.shapes[: len(part.rule.hugging_face)], None)

    def _add(self, entry_slice: _Own) -> None:
        held = entry_slice.held
        if not _is_computed(entry_slice.rule, self.quantisation):
            shard = Shard(
                parameter=held.rule.megatron,
                shape=tuple(held.tensor.shape),
                layout=entry_slice.rule.layout,
                tensors=entry_slice.rule.hugging_face,
                dim=held.dim,
                rank=0 if held.dim is None else held.group.rank(),
                size=1 if held.dim is None else held.group.size(),
                expert=entry_slice.expert,
            )
            self.regions += shard_regions(shard, self.inventory.dims)
            return
        is_gathered = held.dim is not None and not self._is_in_blocks(entry_slice)
        if is_gathered and not self._gathers:
            return
        is_mine = True
        if is_gathered:
            is_mine = self._num_gathered % held.group.size() == held.group.rank()
            self._num_gathered += 1
        computed = _Computed(entry_slice, is_gathered, is_mine)
        for name in entry_slice.rule.hugging_face:
            self._computed.setdefault(name, []).append(computed)
        if is_mine:
            self.regions += self._computed_regions(computed)

    def _is_in_blocks(self, own: _Own) -> bool:
        """Whether every rank can quantise its shard of the weight alone."""
        quantisation = self.quantisation
        if quantisation is None or not quantisation.names >= set(own.rule.hugging_face):
            return False
        groups = self.inventory.dims.num_query_groups
        return shards_are_whole_blocks(
            own.held, own.shapes, quantisation.block, num_query_groups=groups
        )

    def _computed_regions(self, computed: _Computed) -> Iterator[Region]:
        source, quantisation = computed.own, self.quantisation
        for name, shape in zip(source.rule.hugging_face, source.shapes, strict=True):
            start, size = [0] * len(shape), list(shape)
            dim = source.held.dim
            if dim is not None and not computed.is_gathered:
                size[dim] //= source.held.group.size()
                start[dim] = size[dim] * source.held.group.rank()
            if quantisation is not None and name in quantisation.names:
                rows, columns = quantisation.block
                scale_start = (start[0] // rows, start[1] // columns)
                scales = Box(name + SUFFIX, scale_start, scale_shape(tuple(size), (rows, columns)))
                yield contiguous(scales, _parameter(name + SUFFIX, source.expert))
            if source.expert is not None:
                start, size = [source.expert, *start], [1, *size]
            box = Box(name, tuple(start), tuple(size))
            yield contiguous(box, _parameter(name, source.expert))

    def _compute(self, computed: _Computed) -> Mapping[str, torch.Tensor]:
        """The computed tensors, flat, by the parameter of their regions."""
        source, dims = computed.own, self.inventory.dims
        value = self._gather(source.held) if computed.is_gathered else source.held.value
        if not computed.is_mine:
            return {}
        if source.held.dim is not None and not computed.is_gathered:
            size = source.held.group.size()
            dims = replace(dims, num_query_groups=dims.num_query_groups // size)
        results: dict[str, torch.Tensor] = {}
        for name, part in zip(
            source.rule.hugging_face, layouts.split(value, source.rule.layout, dims), strict=True
        ):
            tensors: Mapping[str, torch.Tensor] = {name: part}
            if self.quantisation is not None:
                tensors = self.quantisation.tensors(name, part)
            for each, tensor in tensors.items():
                flat = tensor.contiguous().view(-1)
                if flat.dtype == FP8:  # not every backend has it
                    flat = flat.view(torch.uint8)
                results[_parameter(each, source.expert)] = flat
        return results

    def _gather(self, held: Held) -> torch.Tensor:
        """The whole weight, valid until the next gather. Collective of the ranks that share it."""
        size = held.group.size()
        if size == 1 or self._shards is None:
            return held.value
        failure: Exception | None = None
        flat = self._shards[: size * held.tensor.nbytes].view(held.tensor.dtype)
        shards = list(flat.view(size, *held.tensor.shape))
        shard = shards[held.group.rank()]
        try:
            shard.copy_(held.value)
        except Exception as error:
            failure = error  # the others are in the gather
        # In place: with a list of tensors NCCL's group allocates a second buffer of the weight.
        dist.all_gather_into_tensor(flat, shard.view(-1), group=held.group)
        if failure is not None:
            raise failure
        return layouts.join(shards, held.rule.layout, dim=held.dim or 0)


def _parameter(name: str, expert: int | None) -> str:
    return name if expert is None else f"{name}[{expert}]"


def _is_computed(rule: Rule, quantisation: BlockFp8 | None) -> bool:
    """Whether tensors of a weight are no views of its shards; the same on every rank."""
    is_quantised = quantisation is not None and not quantisation.names.isdisjoint(rule.hugging_face)
    return rule.layout in WITHOUT_ROWS or is_quantised


def _units(inventory: Inventory, quantisation: BlockFp8 | None) -> Iterator[Unit]:
    """The tensors of all entries; those of one weight are in one unit."""
    entries, extra_layers = inventory.entries, inventory.mtp_layers
    follows = must_follow(entries)
    previous: Unit | None = None
    for entry, joins in zip(entries, follows, strict=True):
        is_optional = names.layer_number(entry.rules[0].megatron) in extra_layers
        for unit in _units_of(entry, quantisation, is_optional=is_optional):
            if joins and previous is not None:
                previous = previous.joined(unit)
                continue
            if previous is not None:
                yield previous
            previous = unit
    if previous is not None:
        yield previous


def _units_of(entry: Entry, quantisation: BlockFp8 | None, *, is_optional: bool) -> Iterator[Unit]:
    dtype = str(entry.dtype).removeprefix("torch.")
    rules = entry.rules[:1] if entry.is_stacked else entry.rules
    count = len(rules[0].hugging_face)
    for index, rule in enumerate(rules):
        tensors: list[SentTensor] = []
        shapes = entry.shapes[index * count : (index + 1) * count]
        for name, shape in zip(rule.hugging_face, shapes, strict=True):
            sent: Mapping[str, tuple[Shape, str]] = {name: (shape, dtype)}
            if quantisation is not None:
                sent = quantisation.shapes(name, shape, dtype)
            tensors += [SentTensor(each, *about) for each, about in sent.items()]
        is_divisible = not _is_computed(rule, quantisation)
        yield Unit(entry.owner, tuple(tensors), is_divisible, is_optional)
