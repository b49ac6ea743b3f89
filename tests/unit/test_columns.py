"""Columns behave as the tuples that they replace."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.columns import FloatColumn, IntColumn, RouteColumn, RunColumn, TokenSetColumn

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(INTS, st.slices(20))
def test_an_int_column_equals_a_sequence_of_python_numbers(values, part):
    column = IntColumn(values)
    assert column == tuple(values)
    assert column == values
    assert list(column) == values
    assert all(type(value) is int for value in column)
    assert column[part] == tuple(values[part])
    assert column + values == tuple(values + values) == tuple(values) + column
    assert np.asarray(column).tolist() == values and np.shares_memory(
        np.asarray(column), column.array
    ) is bool(values)
    assert hash(column) == hash(IntColumn(values))


@given(st.lists(st.tuples(st.integers(-300, 300), st.integers(0, 4))), st.slices(10))
def test_a_run_column_equals_the_sequence_that_it_encodes(runs, part):
    values = [value for value, count in runs for _ in range(count)]
    column = RunColumn(runs)
    assert list(column) == values
    assert column == tuple(values) == tuple(column.array.tolist())
    assert column == RunColumn.of(values)
    assert len(column) == len(values)
    assert column.total() == sum(values)
    assert column[part] == values[part]
    assert column + values == values + values == tuple(values) + column
    assert np.asarray(column).tolist() == values


def test_values_of_float32_are_kept_exactly():
    values = np.random.default_rng(0).normal(size=100).astype(np.float32)
    assert list(FloatColumn(values.tolist())) == values.tolist()


def test_a_number_that_does_not_fit_is_an_error():
    with pytest.raises(OverflowError):
        IntColumn([2**31])


def test_columns_differ_by_length_and_value():
    assert IntColumn([1, 2]) != (1,)
    assert IntColumn([1, 2]) != (1, 3)
    assert RunColumn.of([1, 1]) != (1,)
    assert IntColumn([1]) != "1"
    assert IntColumn([1]) != (1.5,)
    assert IntColumn([1]) != (2**40,)
    assert IntColumn([1]) != ("1",)
    assert IntColumn([1, 2]) != ((1,), (1, 2))
    assert FloatColumn([0.1]) == (0.1,)
    assert FloatColumn([0.1]) != (0.1001,)


def test_the_array_of_a_column_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        IntColumn([1]).array[0] = 2


@pytest.mark.parametrize(
    "column",
    [
        IntColumn(range(1000)),
        FloatColumn([0.5] * 1000),
        RouteColumn(np.zeros((500, 2, 1), np.uint8)),
    ],
)
def test_pickling_sends_the_values_as_one_buffer_without_a_copy(column):
    buffers = []
    text = pickle.dumps(column, protocol=5, buffer_callback=buffers.append)
    assert len(text) < 300
    assert sum(buffer.raw().nbytes for buffer in buffers) == column.array.nbytes
    back = pickle.loads(text, buffers=buffers)
    assert back == column
    assert np.shares_memory(back.array, column.array)


def test_run_columns_survive_pickling():
    assert pickle.loads(pickle.dumps(RunColumn.of([1, 1, 0]))) == (1, 1, 0)


def test_routes_are_sliced_and_joined_by_token():
    routes = RouteColumn(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    assert RouteColumn.joined([routes[:1], routes[1:]]) == routes
    assert routes[:2] != routes[1:]
    assert len(routes) == 3


def test_unknown_routes_are_marked_and_never_an_expert():
    assert RouteColumn.dtype(255) == np.uint8  # experts 0 to 254; 255 marks the unknown
    assert RouteColumn.dtype(256) == np.uint16
    routes = RouteColumn(np.zeros((2, 3, 1), np.uint8))
    unknown = RouteColumn(np.full((1, 3, 1), 255, np.uint8))
    mixed = RouteColumn.joined([routes, unknown])
    assert mixed.known.tolist() == [True, True, False]


@given(st.lists(st.lists(st.integers(0, 99), max_size=4).map(tuple), max_size=8), st.data())
def test_a_column_of_sets_is_sliced_joined_and_pickled_by_token(sets, data):
    column = TokenSetColumn.of(sets)
    start, stop = (data.draw(st.integers(-9, 9)) for _ in range(2))
    assert list(column) == sets and len(column) == len(sets)
    assert list(column[start:stop]) == sets[start:stop]
    both = TokenSetColumn.joined([column, TokenSetColumn.whole(2)])
    assert list(both) == [*sets, (), ()]
    assert pickle.loads(pickle.dumps(column)) == column and hash(column[:]) == hash(column)
    assert both != column and column != sets
