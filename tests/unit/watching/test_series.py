"""Curves: what is drawn is what was measured, in few points and short numbers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from common.units import duration_text
from rlpost.extensions.watching.series import not_finite, points, short, smooth, thin

numbers = st.floats(-1e9, 1e9, allow_nan=False)


def test_only_finite_values_are_points_and_missing_ones_leave_a_gap():
    lines = [
        {"step": 0},
        {"step": 1, "x": 2.0},
        {"step": 2, "x": math.nan},
        {"step": 3, "x": None},
        {"step": 4, "x": 1},
    ]
    assert points(lines, "x") == [(1.0, 2.0), (4.0, 1.0)]


def test_values_that_are_not_finite_are_kept_with_their_steps():
    lines = [
        {"step": 1, "x": math.nan},
        {"step": 2, "x": 1.0},
        {"step": 3, "x": math.inf},
        {"step": 4, "x": -math.inf},
        {"step": 5, "x": None},
        {"step": 6, "x": True},
    ]
    assert not_finite(lines, "x") == [(1.0, "NaN"), (3.0, "∞"), (4.0, "-∞"), (5.0, "NaN")]


@given(st.lists(numbers, min_size=1, max_size=900), st.integers(8, 60))
def test_a_thinned_curve_keeps_its_ends_its_order_and_its_peaks(values, at_most):
    curve = [(float(n), value) for n, value in enumerate(values)]
    few = thin(curve, at_most)
    assert len(few) <= max(at_most, 3)
    assert few[0] == curve[0] and few[-1] == curve[-1]
    assert [x for x, _ in few] == sorted({x for x, _ in few})
    assert set(few) <= set(curve)
    assert max(y for _, y in few) == max(values) and min(y for _, y in few) == min(values)


@given(st.lists(numbers, min_size=1, max_size=50))
def test_a_smoothed_curve_stays_within_what_it_smooths_and_begins_with_it(values):
    curve = [(float(n), value) for n, value in enumerate(values)]
    even = smooth(curve, 5)
    assert even[0] == curve[0]
    slack = 1e-6 * max(1.0, *map(abs, values))
    assert all(min(values) - slack <= y <= max(values) + slack for _, y in even)


def test_numbers_and_times_are_short():
    assert [short(x) for x in (math.nan, math.inf)] == ["nan", "inf"]
    assert [short(x) for x in (0, 0.25, -12.0, 1234.0, 2.5e6, 3e-5, 3.4e-4)] == [
        *("0", "0.25", "-12", "1.23k", "2.5M", "3e-5", "3.4e-4")
    ]
    assert [duration_text(x) for x in (0.25, 75, 3725, 190000)] == [
        "0.25 s",
        "1 min 15 s",
        "1 h 2 min",
        "2 d 4 h",
    ]
