"""Boxes and regions, and the regions of a shard against the functions that move tensors."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.models.layout_rows import Shard, shard_regions
from rlpost.models.names import Dimensions
from rlpost.models.regions import (
    Box,
    Boxes,
    Region,
    group_from_json,
    group_to_json,
    grouped,
    intersect,
    whole,
)
from rlpost.trainer.weights.layouts import merge, shard

HIDDEN = 6
SPANS = st.tuples(st.integers(0, 5), st.integers(1, 5))


@given(st.lists(st.tuples(SPANS, SPANS), min_size=0, max_size=3))
def test_the_intersection_has_the_elements_of_both(spans):
    one = Box("t", tuple(a[0] for a, _ in spans), tuple(a[1] for a, _ in spans))
    other = Box("t", tuple(b[0] for _, b in spans), tuple(b[1] for _, b in spans))
    grids = [torch.zeros((10,) * len(spans), dtype=torch.bool) for _ in range(2)]
    for grid, box in zip(grids, (one, other), strict=True):
        grid[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))] = True
    common = one.intersect(other)
    assert common == other.intersect(one)
    assert (0 if common is None else common.num_elements) == int((grids[0] & grids[1]).sum())


def test_both_sides_of_an_intersection_are_the_same_elements():
    """Rows 2 to 5 of a transposed weight, and a row of it that is last in its parameter."""
    held = Region("t", (2, 0), (4, 3), "trainer", 10, (1, 8))
    needed = Region("t", (5, 0), (1, 2), "engine", 7, (2, 1))
    assert intersect(held, needed) == (
        Region("t", (5, 0), (1, 2), "trainer", 13, (1, 8)),
        needed,
    )
    assert intersect(held, whole("other", (8, 3))) is None


NAMES = [f"t{number}" for number in range(8)]
SMALL = st.tuples(st.integers(0, 1), st.integers(1, 2))


@given(st.lists(st.tuples(st.sampled_from(NAMES), SMALL, st.booleans())))
def test_groups_have_each_box_once_and_survive_json(drawn):
    regions = [
        Region(name, span[:1], span[1:], "" if is_by_name else "p", 0, (1,))
        for name, span, is_by_name in drawn
    ]
    numbers = {name: number for number, name in enumerate(NAMES)}
    groups = grouped(regions)
    read = [
        group_from_json(json.loads(json.dumps(group_to_json(one, numbers))), NAMES)
        for one in groups
    ]
    assert read == groups
    found = [(box, one.is_by_name) for one in groups for box in Boxes((one,))]
    assert len(found) == len(set(found))
    assert set(found) == {(one.box, not one.parameter) for one in regions}
    boxes = [one.box for one in regions]
    assert list(Boxes.of(boxes)) == boxes
    assert sum(one.num_elements for one in Boxes.of(boxes).groups) == sum(
        box.num_elements for box in boxes
    )


LINEAR = {
    "linear_key_heads": 4,
    "linear_key_dim": 3,
    "linear_value_heads": 8,
    "linear_value_dim": 5,
}
ROWS = {
    "qkv": (16, 8, 8),
    "gated_qkv": (32, 8, 8),
    "linear_qkv": (4 * (3 + 3 + 10),),
    "linear_qkvz": (4 * (3 + 3 + 10), 40),
    "linear_ba": (8, 8),
    "gated": (8, 8),
    "fused_gated": (16,),
    "vocabulary": (13,),
    "plain": (8,),
    "transposed": (8,),
    "transposed_gated": (16,),
}
"""Rows of the Hugging Face tensors, for 4 groups of heads of 2; transposed: columns."""


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("expert", [None, 3])
@pytest.mark.parametrize("layout", ROWS)
def test_a_shard_holds_the_elements_that_its_regions_name(layout, expert, size):
    """Each element is a number; 8 ranks of 4 groups of heads share groups."""
    if layout.startswith("linear") and size > 4:
        return  # a key head is not sharded
    dims = Dimensions(num_query_groups=4, head_dim=2, vocab_size=13, **LINEAR)
    full, start = [], 1
    for rows in ROWS[layout]:
        tensor = torch.arange(start, start + rows * HIDDEN).view(rows, HIDDEN)
        full.append(tensor.mT.contiguous() if layout.startswith("transposed") else tensor)
        start += rows * HIDDEN
    merged = merge(full, layout, dims)
    seen = [torch.zeros_like(tensor) for tensor in full]
    for rank in range(size):
        part = shard(merged, layout, dim=0, rank=rank, size=size)
        part = part.clone(memory_format=torch.contiguous_format)
        names = tuple(map(str, range(len(full))))
        about = Shard("p", tuple(part.shape), layout, names, 0, rank, size, expert)
        for region in shard_regions(about, dims):
            values = part.view(-1).as_strided(region.size, region.strides, region.offset)
            box = region.box
            if expert is not None:
                assert (box.start[0], box.size[0]) == (expert, 1)
                box, values = Box(box.tensor, box.start[1:], box.size[1:]), values[0]
            at = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
            seen[int(region.tensor)][at] += values
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, full, strict=True))


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_a_weight_that_is_sharded_by_columns_has_them(layout):
    dims = Dimensions(num_query_groups=1, head_dim=1, vocab_size=0)
    tensor = torch.arange(4 * HIDDEN).view(4, HIDDEN)
    merged = merge([tensor], layout, dims)
    part = shard(merged, layout, dim=1, rank=1, size=2).clone(memory_format=torch.contiguous_format)
    (region,) = shard_regions(Shard("p", tuple(part.shape), layout, ("t",), 1, 1, 2), dims)
    values = part.view(-1).as_strided(region.size, region.strides, region.offset)
    at = tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))
    assert torch.equal(values, tensor[at]) and region.num_elements == tensor.numel() // 2
