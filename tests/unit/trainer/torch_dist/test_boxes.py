"""Every run of consecutive elements consists of a few boxes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.trainer.torch_dist.shards import boxes_of_range, share_of, split_range

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shapes, st.data())
def test_boxes_hold_exactly_the_range_in_order_and_are_few(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    elements = np.arange(numel).reshape(shape)
    boxes = boxes_of_range(shape, start, end)
    found = []
    for box in boxes:
        place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        held = elements[place].ravel()
        assert (held == np.arange(box.start, box.start + box.numel)).all()
        found += held.tolist()
    assert found == list(range(start, end))
    assert len(boxes) <= 2 * len(shape) - 1


def test_a_scalar_is_one_box():
    (box,) = boxes_of_range((), 0, 1)
    assert (box.offsets, box.sizes, box.numel) == ((), (), 1)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50), st.integers(1, 30))
def test_ranges_are_consecutive_and_within_the_bound(start, length, max_numel, row):
    end = start + length
    ranges = list(split_range(start, end, max_numel=max_numel, row=row))
    assert [number for first, last in ranges for number in range(first, last)] == list(
        range(start, end)
    )
    assert all(0 < last - first <= max_numel for first, last in ranges)


def test_ranges_end_at_whole_rows_where_a_row_fits():
    assert list(split_range(7, 60, max_numel=25, row=10)) == [(7, 20), (20, 40), (40, 60)]
    assert list(split_range(0, 10, max_numel=4, row=10)) == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.parametrize(
    "numel, row, count", [(100, 10, 3), (7, 1, 4), (64, 64, 4), (95, 10, 4), (3, 1, 8)]
)
def test_shares_cover_a_tensor_once_in_whole_rows(numel, row, count):
    shares = [share_of(numel, row, index, count) for index in range(count)]
    assert [number for first, last in shares for number in range(first, last)] == list(range(numel))
    assert all(first % row == 0 for first, last in shares if first < last)
