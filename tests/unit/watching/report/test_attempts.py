"""A run of hundreds of attempts: few rows, few marks, the right steps and times."""

import math
from datetime import timedelta
from itertools import pairwise

import pytest

from rlpost.extensions.watching.report.page import (
    MAX_PARTS,
    bar_marks,
    bar_spans,
    by_cause,
    committed_steps,
    steps_lost,
)
from rlpost.extensions.watching.timeline import MAX_CLOCK_POINTS, Attempt, hours_of_steps, timeline
from tests.unit.watching.report.runs import BEGIN


def entries(*told):
    """(seconds, event, details) as entries of a ledger."""
    return [
        {"time": (BEGIN + timedelta(seconds=at)).isoformat(), "event": event, **details}
        for at, event, details in told
    ]


def attempt(name, ended, startup_s=10.0):
    return Attempt(name, BEGIN, startup_s=startup_s, lasted_s=100.0, ended=ended)


def many_attempts(number=200):
    """Attempts of 1000 s: 100 s to start, five checkpoints, a preemption."""
    told = []
    for n in range(number):
        at, name = n * 1000, str(n)
        told.append((at, "attempt", {"attempt": name}))
        told.append((at + 100, "ready", {"attempt": name, "step": 5 * n}))
        told += [(at + 200 + 100 * k, "committed", {"step": 5 * n + k}) for k in range(1, 6)]
        told.append((at + 900, "preempted", {"reason": "SIGUSR2"}))
        told.append(
            (at + 990, "verdict", {"attempt": name, "verdict": "requeue", "answer": "again"})
        )
    return entries(*told)


def test_attempts_that_ended_alike_are_one_row_whatever_their_numbers():
    found = by_cause(
        [
            attempt("0", "failed: rank 3 of n017 died after 12.5 s"),
            attempt("1", "preempted"),
            attempt("2", "failed: rank 60 of n001 died after 900 s", startup_s=None),
            attempt("3", "failed: out of memory"),
            attempt("4", ""),
            attempt("10", "failed: rank 7 of n002 died after 1 s"),
        ]
    )
    rows = [(one.text, one.names, one.lasted_s, one.never_ready) for one in found]
    assert rows == [
        ("failed: rank 7 of n002 died after 1 s", ("0", "2", "10"), 300.0, 1),
        ("preempted", ("1",), 100.0, 0),
        ("failed: out of memory", ("3",), 100.0, 0),
        ("running", ("4",), 100.0, 0),
    ]
    assert (found[0].range, found[1].range) == ("0 to 10", "1")


def test_steps_that_were_trained_again_are_counted_over_attempts_and_recoveries():
    events = entries(
        (0, "started", {"again": None}),
        (1, "started", {"again": {"steps": 7, "step_s": 70.0}}),
        (2, "recovered", {"role": "trainer", "steps_again": 2}),
        (3, "recovered", {"role": "driver", "steps_again": 3, "again": {"steps": 3}}),
        (4, "recovered", {"role": "engine"}),
    )
    assert steps_lost(events) == 12
    assert committed_steps(many_attempts(2)) == [float(step) for step in range(1, 11)]


def test_a_bar_of_many_attempts_has_few_parts_without_gaps_and_the_same_totals():
    events = many_attempts()
    told = timeline(events, BEGIN + timedelta(seconds=200_000))
    spans = bar_spans(told)
    assert len(told.spans) > MAX_PARTS >= len(spans)
    assert spans[0].begin_s == 0 and spans[-1].end_s == pytest.approx(told.end_s)
    assert all(a.end_s == pytest.approx(b.begin_s) for a, b in pairwise(spans))
    training = sum(span.end_s - span.begin_s for span in spans if span.doing == "training")
    assert training == pytest.approx(told.spent_s("training"), rel=0.3)
    marks = bar_marks(told)
    assert len(told.marks) == 1200 and len(marks) <= 2 * MAX_PARTS
    assert marks[0].text == "5 times, the first: checkpoint at step 1"
    few = timeline(many_attempts(2), BEGIN + timedelta(seconds=2000))
    assert bar_spans(few) == list(few.spans) and bar_marks(few) == list(few.marks)


def test_a_step_ended_as_long_after_the_start_as_the_steps_before_it_took():
    """The second attempt trains steps 3 and 4 again: only its lines are in the metrics."""
    events = entries(
        (0, "submitted", {}),
        (3600, "ready", {"step": 0}),
        (20_000, "preempted", {}),
        (36_000, "ready", {"step": 2}),
    )
    lines = [
        {"step": 0, "time/eval_s": 360.0},
        {"step": 1, "time/step_s": 720.0},
        {"step": 2, "time/step_s": 720.0, "checkpoint/blocking_s": 36.0},
        {"step": 3, "time/step_s": 1800.0},
        {"step": 4, "time/step_s": 1800.0},
    ]
    assert hours_of_steps(events, lines) == [
        (0.0, pytest.approx(1.1)),
        (1.0, pytest.approx(1.3)),
        (2.0, pytest.approx(1.51)),
        (3.0, pytest.approx(10.5)),
        (4.0, pytest.approx(11.0)),
    ]
    assert hours_of_steps(events[:1], lines) == hours_of_steps([], lines) == []


def test_the_clock_of_a_long_run_has_few_points_and_never_goes_back():
    lines = [{"step": step, "time/step_s": 5.0 + math.sin(step)} for step in range(1, 1001)]
    found = hours_of_steps(many_attempts(), lines)
    assert 100 < len(found) <= MAX_CLOCK_POINTS
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(found))
