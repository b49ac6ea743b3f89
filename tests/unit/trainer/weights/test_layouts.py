"""Layouts: pairs of bitwise inverse functions, and the position of single values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.errors import WeightError
from rlpost.models.names import Dimensions
from rlpost.trainer.weights.layouts import join, merge, shard, split
from rlpost.trainer.weights.trainer_side import FlatMemory

HIDDEN = 6


def hugging_face_tensors(
    layout: str, dims: Dimensions, per_group: int, rows: int
) -> list[torch.Tensor]:
    """Random full tensors as a checkpoint holds them."""
    heads = {
        "q": dims.num_query_groups * per_group,
        "k": dims.num_query_groups,
        "v": dims.num_query_groups,
    }
    sizes = {
        "qkv": [heads[part] * dims.head_dim for part in "qkv"],
        "gated": [rows, rows],
        "vocabulary": [dims.vocab_size],
        "plain": [rows],
    }[layout]
    return [torch.randn(size, HIDDEN) for size in sizes]


@given(
    layout=st.sampled_from(["qkv", "gated", "vocabulary", "plain"]),
    size=st.integers(1, 4),
    multiple=st.integers(1, 3),
    per_group=st.integers(1, 3),
    vocab_size=st.integers(4, 19),
)
def test_a_tensor_survives_merge_shard_join_and_split_bit_by_bit(
    layout, size, multiple, per_group, vocab_size
):
    dims = Dimensions(num_query_groups=size * multiple, head_dim=2, vocab_size=vocab_size)
    tensors = hugging_face_tensors(layout, dims, per_group, rows=size * multiple)
    full = merge(tensors, layout, dims)
    shards = [shard(full, layout, dim=0, rank=rank, size=size) for rank in range(size)]
    assert len({part.shape for part in shards}) == 1, "every rank holds as much"
    back = split(join(shards, layout, dim=0), layout, dims)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, tensors, strict=True))


def test_query_key_and_value_of_a_group_are_adjacent():
    """With one row a head: group 0 has queries 0 and 1, then its key and its value."""
    dims = Dimensions(num_query_groups=2, head_dim=1, vocab_size=0)
    query, key, value = (
        torch.tensor([[0], [1], [2], [3]]),
        torch.tensor([[10], [11]]),
        torch.tensor([[20], [21]]),
    )
    assert merge([query, key, value], "qkv", dims).flatten().tolist() == [
        0,
        1,
        10,
        20,
        2,
        3,
        11,
        21,
    ]


def test_every_shard_of_a_gated_weight_has_gate_above_up():
    full = merge(
        [torch.tensor([[0], [1]]), torch.tensor([[10], [11]])], "gated", Dimensions(1, 1, 0)
    )
    shards = [
        shard(full, "gated", dim=0, rank=rank, size=2).flatten().tolist() for rank in range(2)
    ]
    assert shards == [[0, 10], [1, 11]]


def test_a_vocabulary_is_padded_with_zeros_at_its_end():
    last = shard(torch.ones(5, 2), "vocabulary", dim=0, rank=1, size=2)
    assert last.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_a_row_parallel_weight_is_sharded_along_its_columns():
    full = torch.arange(8).reshape(2, 4)
    shards = [shard(full, "plain", dim=1, rank=rank, size=2) for rank in range(2)]
    assert shards[1].tolist() == [[2, 3], [6, 7]]
    assert torch.equal(join(shards, "plain", dim=1), full)


def test_shapes_are_planned_without_data():
    dims = Dimensions(num_query_groups=2, head_dim=4, vocab_size=0)
    parts = split(torch.empty(2 * (3 + 2) * 4, HIDDEN, device="meta"), "qkv", dims)
    assert [tuple(part.shape) for part in parts] == [(24, HIDDEN), (8, HIDDEN), (8, HIDDEN)]


def test_uneven_shards_are_refused():
    with pytest.raises(WeightError, match="tensor-model-parallel-size 2"):
        shard(torch.ones(3, 2), "plain", dim=0, rank=0, size=2)


LINEAR = Dimensions(
    num_query_groups=2,
    head_dim=2,
    vocab_size=0,
    linear_key_heads=2,
    linear_key_dim=3,
    linear_value_heads=4,
    linear_value_dim=5,
)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ("gated_qkv", (16, 4, 4)),
        ("linear_qkv", (32,)),
        ("linear_qkvz", (32, 20)),
        ("linear_ba", (4, 4)),
        ("transposed", (7,)),
        ("interleaved_gated", (HIDDEN,)),
    ],
)
def test_tensors_of_other_layouts_survive_merge_and_split_bit_by_bit(layout, rows):
    tensors = [torch.randn(count, HIDDEN) for count in rows]
    back = split(merge(tensors, layout, LINEAR), layout, LINEAR)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, tensors, strict=True))


def test_half_of_the_rows_of_linear_attention_belong_to_half_of_its_key_heads():
    """So that a tensor-parallel rank may take consecutive rows."""
    query, key = (torch.arange(6) // 3 for _ in range(2))
    value = torch.arange(20) // 10
    merged = merge([torch.cat([query, key, value]), value], "linear_qkvz", LINEAR)
    assert merged.tolist() == [0] * 26 + [1] * 26


def test_flat_memory_holds_the_concatenated_tensors_and_is_reused_on_a_cpu():
    memory = FlatMemory()
    first = [
        torch.arange(6, dtype=torch.float32).view(2, 3).T,
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    ]
    flat = memory.filled(first)
    assert flat.dtype == torch.uint8 and len(flat) == 6 * 4 + 2 * 2
    assert torch.equal(flat[:24].view(torch.float32), first[0].flatten())
    assert torch.equal(flat[24:].view(torch.bfloat16), first[1])
    where, smaller = flat.data_ptr(), memory.filled([torch.ones(3)])
    assert smaller.data_ptr() == where and smaller.view(torch.float32).tolist() == [1.0, 1.0, 1.0]
    larger = memory.filled([torch.full((100,), 2.0)])
    assert larger.view(torch.float32).tolist() == [2.0] * 100
