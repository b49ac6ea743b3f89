"""Check that the shards of all ranks cover every tensor of the model exactly once. Pure.

The position of a shard in its Hugging Face tensor is derived here from the shard index, and the
rank that must hold it from the layout, independently of the code that shards.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from rlpost.config.plan.shape import Layout, layers_of
from rlpost.config.plan.shape import Shape as ModelShape
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts, Shape, Weight
from tests.contract.all_ranks.published import Published
from tests.contract.all_ranks.rank_coordinates import RankCoordinates, place
from tests.contract.all_ranks.saved import CheckpointPart, SavedFacts

EMBEDDING = "embed_tokens.weight"
VOCABULARY = (EMBEDDING, "lm_head.weight")
"""Ends of names; a model with images has other prefixes."""
OPTIMIZER_PREFIX = "optimizer.state."
UNTRAINED, UNTRAINED_HF = "expert_bias", "e_score_correction_bias"
"""A buffer of the router, as Megatron and as Hugging Face names it.

It has no optimizer state.
"""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.|.*\[(\d+)\]$)")
_STACKED = re.compile(r"\.mlp\.experts\.\D")
TRANSPOSED = ("transposed", "transposed_gated", "interleaved_gated")
"""Layouts of weights whose tensor has inputs before outputs."""

Piece = tuple[int, int, int]
"""Dimension, start and end of the part of a tensor."""


def layer_of(name: str) -> int | None:
    """Return the layer of a Hugging Face tensor; None outside of the layers."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def stage_of(name: str, layout: Layout, num_layers: int) -> int:
    """Return the pipeline stage that must hold a Hugging Face tensor."""
    layer = layer_of(name)
    if layer is None:
        return 0 if name.endswith(EMBEDDING) else layout.pipeline - 1
    if layer >= num_layers:  # multi-token prediction
        return layout.pipeline - 1
    return _stage_of_layer(layer, layout, num_layers)


@lru_cache(maxsize=1024)
def _stage_of_layer(layer: int, layout: Layout, num_layers: int) -> int:
    return next(
        stage for stage in range(layout.pipeline) if layer in layers_of(layout, num_layers, stage)
    )


def weight_problems(
    ranks: Mapping[int, RankFacts], layout: Layout, shape: ModelShape, published: Published
) -> Iterator[str]:
    """Check that each rank holds its stage and experts, and that shards cover each tensor once."""
    tensors = _unstacked(published.tensors, shape)
    holders = {name: _holders(name, layout, shape) for name in tensors}
    by_place: dict[tuple[int, int], list[str]] = {}
    for name, (stage, expert_rank) in holders.items():
        for holder in range(layout.expert) if expert_rank is None else [expert_rank]:
            by_place.setdefault((stage, holder), []).append(name)
    pieces: dict[str, set[Piece]] = {name: set() for name in tensors}
    for rank, facts in ranks.items():
        where = place(layout, rank)
        held = Counter(
            name for one in facts.weights if not one.is_tied_copy for name in one.hugging_face
        )
        expected_names = Counter(by_place.get((where.pipeline, where.expert), ()))
        for name in sorted((expected_names - held).keys()):
            yield f"rank {rank}: it lacks {name}"
        for name in sorted((held - expected_names).keys()):
            yield f"rank {rank}: it holds {name}, which belongs on other ranks or is held twice"
        for one in facts.weights:
            if not one.is_tied_copy and pieces.keys() >= set(one.hugging_face):
                one = _as_stored(one)
                yield from _shard_problems(rank, one, where, tensors)
                for name, piece in _pieces(one, tensors, shape):
                    pieces[name].add(piece)
    for name, tensor_pieces in pieces.items():
        if not _tiles(tensor_pieces, tensors[name]):
            yield f"{name} of shape {tensors[name]}: its shards are {sorted(tensor_pieces)}"
    yield from _tied_problems(ranks, layout, shape)


def _unstacked(tensors: Mapping[str, Shape], shape: ModelShape) -> dict[str, Shape]:
    """The tensors, with one for each expert in place of a tensor that holds all experts."""
    found: dict[str, Shape] = {}
    for name, whole in tensors.items():
        if shape.stacked_experts and _STACKED.search(name):
            found |= {f"{name}[{expert}]": whole[1:] for expert in range(whole[0])}
        else:
            found[name] = whole
    return found


def _as_stored(weight: Weight) -> Weight:
    """The weight with the axes of its tensor."""
    if weight.layout not in TRANSPOSED or len(weight.shape) != 2:
        return weight
    dim = None if weight.dim is None else 1 - weight.dim
    return replace(weight, shape=weight.shape[::-1], dim=dim)


def _holders(name: str, layout: Layout, shape: ModelShape) -> tuple[int, int | None]:
    """Return the stage of a tensor, and for an expert's tensor the expert-parallel rank."""
    expert = _EXPERT.search(name)
    stage = stage_of(name, layout, shape.num_layers)
    if expert is None:
        return stage, None
    per_rank = max(1, shape.num_experts // layout.expert)
    return stage, int(expert[1] or expert[2]) // per_rank


def _tied_problems(
    ranks: Mapping[int, RankFacts], layout: Layout, shape: ModelShape
) -> Iterator[str]:
    """Check that a tied embedding has a copy on the last stage if there are several."""
    for rank, facts in ranks.items():
        copies = sum(one.is_tied_copy for one in facts.weights)
        is_last = place(layout, rank).pipeline == layout.pipeline - 1
        wanted = int(shape.tied and layout.pipeline > 1 and is_last)
        if copies != wanted:
            yield f"rank {rank}: it has {copies} copies of the tied embedding, {wanted} are needed"


def _shard_problems(
    rank: int, weight: Weight, where: RankCoordinates, tensors: Mapping[str, Shape]
) -> Iterator[str]:
    """Check that a shard has its rank's coordinate as index, and the width of its tensors."""
    coordinate = where.expert_tensor if weight.is_expert else where.tensor
    if weight.num_shards > 1 and weight.shard != coordinate:
        yield f"rank {rank}: it holds shard {weight.shard} of {weight.name}, its place is {coordinate}"
    for name in weight.hugging_face:
        if _width(weight.shape, weight.dim) != _width(tensors[name], weight.dim):
            yield f"rank {rank}: {weight.name} of shape {weight.shape} is no shard of {name}, {tensors[name]}"


def _width(shape: Shape, dim: int | None) -> Shape:
    """The shape without the dimension that is sharded or, in layouts of several tensors, joined."""
    dim = dim or 0
    return shape[:dim] + shape[dim + 1 :]


def _pieces(
    weight: Weight, tensors: Mapping[str, Shape], shape: ModelShape
) -> Iterator[tuple[str, Piece]]:
    """Yield the parts of each Hugging Face tensor that a weight holds."""
    dim = weight.dim or 0
    rows = weight.shape[dim]
    whole = sum(tensors[name][dim] for name in weight.hugging_face)
    for name in weight.hugging_face:
        begin = 0
        for size in _kinds(weight, tensors[name][dim], shape):
            # A rank's rows of each kind (query and key, gate and up) have the proportions of the
            # whole tensors; the padding of a vocabulary counts to the last rank.
            length = rows if weight.layout == "vocabulary" else rows * size // whole
            start = begin + weight.shard * length
            end = start + length
            begin += size
            yield name, (dim, start, min(end, size) if weight.layout == "vocabulary" else end)


def _kinds(weight: Weight, size: int, shape: ModelShape) -> tuple[int, ...]:
    """Rows of each kind in one tensor, which is sharded kind by kind."""
    if weight.layout == "fused_gated":  # gate above up, both in one tensor
        return size // 2, size // 2
    if weight.layout in ("linear_qkv", "linear_qkvz") and shape.linear is not None:
        keys, values = shape.linear.keys, shape.linear.values
        if size == 2 * keys + values:
            return keys, keys, values
    return (size,)


def _tiles(pieces: set[Piece], shape: Shape) -> bool:
    """Whether the pieces cover one dimension completely and without overlap."""
    if len({dim for dim, _, _ in pieces}) != 1:
        return False
    position = 0
    for _, start, end in sorted(pieces):
        if start != position:
            return False
        position = end
    dim = next(iter(pieces))[0]
    return position == shape[dim]


def optimizer_problems(ranks: Mapping[int, RankFacts], *, spread: bool) -> Iterator[str]:
    """Check that ranks with equal weights hold the optimizer state of every element once.

    Without ``spread`` (the distributed optimizer) each of these ranks must have the whole state.
    """
    ranges: dict[tuple[tuple[int, ...], str], list[tuple[int, int]]] = {}
    sizes: dict[tuple[tuple[int, ...], str], int] = {}
    for facts in ranks.values():
        for weight in facts.trained:
            kind = "expert_data" if weight.is_expert else "data_with_context"
            group = facts.groups[kind] if spread else (facts.rank,)
            sizes[group, weight.name] = weight.size
            intervals = ranges.setdefault((group, weight.name), [])
            if weight.optimizer is not None:
                intervals.append(weight.optimizer)
    for (group, name), intervals in ranges.items():
        position, is_whole = 0, True
        for start, end in sorted(intervals):
            is_whole &= start == position
            position = end
        if not is_whole or position != sizes[group, name]:
            yield f"ranks {group}: the optimizer has {sorted(intervals)} of the {sizes[group, name]} elements of {name}"


def checkpoint_problems(
    ranks: Mapping[int, SavedFacts],
    layout: Layout,
    published: Published,
    *,
    num_adapted: int | None = None,
) -> Iterator[str]:
    """Check that the boxes that the ranks write cover every tensor of a checkpoint once.

    All tensors together must have the elements of the model as weights, and those that are trained
    as optimizer state; of a model with adapters ``num_adapted``, their elements alone.
    """
    parts: dict[str, list[CheckpointPart]] = {}
    for facts in ranks.values():
        for part in facts.checkpoint:
            parts.setdefault(part.key, []).append(part)
    totals = {"weights": 0, "optimizer": 0}
    for key, tensor_parts in parts.items():
        if not key.endswith(UNTRAINED):
            kind = "optimizer" if key.startswith(OPTIMIZER_PREFIX) else "weights"
            totals[kind] += math.prod(tensor_parts[0].global_shape)
        if problem := _part_problem(tensor_parts):
            yield f"checkpoint: {key}: {problem}"
    rows = next(shape[0] for name, shape in published.tensors.items() if name.endswith(EMBEDDING))
    padding = -rows % layout.tensor
    num_elements = 0
    for name, shape in published.tensors.items():
        rows = shape[0] + (padding if name.endswith(VOCABULARY) else 0)
        num_elements += 0 if name.endswith(UNTRAINED_HF) else math.prod((rows, *shape[1:]))
    whose = "the model has {} with its padded vocabulary"
    if num_adapted is not None:
        num_elements, whose = num_adapted, "the adapters have {}"
    if totals["weights"] != num_elements:
        yield f"checkpoint: its weights have {totals['weights']} elements, {whose.format(num_elements)}"
    if num_adapted is None and (frozen := num_frozen(ranks)):
        num_elements, whose = num_elements - frozen, "{} are trained"
    if totals["optimizer"] != num_elements:
        yield f"checkpoint: its optimizer has {totals['optimizer']} elements, {whose.format(num_elements)}"


def num_frozen(ranks: Mapping[int, RankFacts]) -> int:
    """Return the elements of all weights that are computed with but not trained, each once."""
    shards = {
        (one.name, one.shard): one.size
        for facts in ranks.values()
        for one in facts.weights
        if one.is_parameter and not one.is_trained and not one.is_tied_copy
    }
    return sum(shards.values())


def _part_problem(parts: list[CheckpointPart]) -> str | None:
    """Return the problem of the boxes of one tensor, or None."""
    shapes = {part.global_shape for part in parts}
    if len(shapes) != 1:
        return f"the ranks disagree about its shape: {sorted(shapes)}"
    whole = next(iter(shapes))
    for part in parts:
        ends = [start + length for start, length in zip(part.offset, part.shape, strict=True)]
        if any(end > size for end, size in zip(ends, whole, strict=True)):
            return f"the box at {part.offset} of shape {part.shape} does not lie in {whole}"
    if twice := _overlap(parts):
        return f"the box at {twice.offset} of shape {twice.shape} is written by several ranks, in part at least"
    written = sum(math.prod(part.shape) for part in parts)
    if written != math.prod(whole):
        return f"{written} of its {math.prod(whole)} elements are written"
    return None


def _overlap(parts: list[CheckpointPart]) -> CheckpointPart | None:
    """Return a box that overlaps another, or None.

    Only boxes that meet along one axis are compared: the axis along which most boxes are apart,
    since the number of comparisons is quadratic in the boxes that meet.
    """
    axis = max(
        range(len(parts[0].global_shape)),
        key=lambda each: len({part.offset[each] for part in parts}),
        default=None,
    )
    if axis is None:
        return parts[1] if len(parts) > 1 else None
    reaching: list[CheckpointPart] = []
    for part in sorted(parts, key=lambda each: each.offset[axis]):
        reaching = [
            other
            for other in reaching
            if other.offset[axis] + other.shape[axis] > part.offset[axis]
        ]
        if any(_meet(part, other) for other in reaching):
            return part
        reaching.append(part)
    return None


def _meet(one: CheckpointPart, other: CheckpointPart) -> bool:
    return all(
        a < b + length_b and b < a + length_a
        for a, length_a, b, length_b in zip(
            one.offset, one.shape, other.offset, other.shape, strict=True
        )
    )
