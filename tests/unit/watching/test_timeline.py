"""The time of a run from its ledger: nothing counted twice, nothing left out."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from rlpost.durable.commit import checkpoint_name
from rlpost.extensions.watching.goodput import goodput
from rlpost.extensions.watching.gpu_layout import GpuLayout
from rlpost.extensions.watching.timeline import timeline

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def ledger(*entries):
    return [
        {"time": (BEGIN + timedelta(seconds=at_s)).isoformat(), "event": event, **details}
        for at_s, event, details in entries
    ]


PREEMPTED = ledger(
    (0, "submitted", {"job_id": "1"}),
    (10, "attempt", {"attempt": 0, "nodes": "n[01-02]"}),
    (20, "started", {"attempt": "0", "step": 0, "nodes": ["n01", "n02"]}),
    (50, "ready", {"attempt": "0", "step": 0}),
    (90, "committed", {"step": 7, "checkpoint": checkpoint_name(7)}),
    (95, "preempted", {"reason": "TERM"}),
    (100, "verdict", {"attempt": 0, "verdict": "requeue", "cause": "preempted", "answer": "again"}),
    (130, "attempt", {"attempt": 1, "nodes": "n[01-02]"}),
    (135, "started", {"attempt": "1", "step": 7, "nodes": ["n01", "n02"]}),
    (150, "ready", {"attempt": "1", "step": 7}),
)
DONE = ledger(
    (200, "committed", {"step": 9, "checkpoint": checkpoint_name(9)}),
    (210, "done", {"step": 9}),
    (215, "verdict", {"attempt": 1, "verdict": "done", "cause": "0", "answer": 0}),
)


def spans(told):
    return [(span.doing, span.begin_s, span.end_s, span.attempt) for span in told.spans]


def test_every_second_of_a_run_is_spent_on_one_thing():
    told = timeline(PREEMPTED + DONE, BEGIN + timedelta(days=9))
    assert spans(told) == [
        ("waiting", 0, 10, None),
        ("starting", 10, 50, "0"),
        ("training", 50, 95, "0"),
        ("ending", 95, 100, "0"),
        ("waiting", 100, 130, "0"),
        ("starting", 130, 150, "1"),
        ("training", 150, 210, "1"),
    ]
    assert (
        sum(told.spent_s(doing) for doing in ("waiting", "starting", "training", "ending"))
        == told.end_s
        == 210
    )
    assert [(mark.kind, mark.at_s) for mark in told.marks] == [
        ("committed", 90),
        ("preempted", 95),
        ("committed", 200),
        ("done", 210),
    ]
    assert told.num_preemptions == 1


def test_what_is_under_way_lasts_until_now():
    told = timeline(PREEMPTED, BEGIN + timedelta(seconds=170))
    assert spans(told)[-1] == ("training", 150, 170, "1")
    first, second = told.attempts
    assert (first.name, first.nodes, first.startup_s, first.first_step, first.last_saved) == (
        "0",
        "n01, n02",
        40,
        0,
        7,
    )
    assert (first.lasted_s, first.ended) == (90, "preempted: TERM; requeued")
    assert (second.first_step, second.last_saved, second.lasted_s, second.ended) == (
        7,
        None,
        40,
        "",
    )


def test_a_failure_that_does_not_come_back_ends_the_time():
    end = ledger(
        (160, "verdict", {"attempt": 1, "verdict": "config", "cause": "no such model", "answer": 2})
    )
    told = timeline(PREEMPTED + end, BEGIN + timedelta(days=1))
    assert told.end_s == 160
    assert told.marks[-1].kind == "failed"
    assert told.attempts[-1].ended == "config: no such model"


@pytest.mark.parametrize("cut", range(1, len(PREEMPTED + DONE)))
def test_any_beginning_of_a_ledger_has_spans_without_a_gap(cut):
    told = timeline((PREEMPTED + DONE)[:cut], BEGIN + timedelta(seconds=300))
    ends = [(span.begin_s, span.end_s) for span in told.spans]
    assert ends[0][0] == 0 and all(end == begin for (_, end), (begin, _) in pairwise(ends))
    assert all(begin < end for begin, end in ends)


def test_a_ledger_without_entries_tells_nothing():
    assert timeline([], BEGIN) is None


def test_a_restart_that_slurm_refused_ends_the_run_and_counts_as_one_end():
    """The batch host corrects its decision with a second verdict."""
    failed = {"attempt": 0, "verdict": "failed", "cause": "CUDA error"}
    entries = [
        *PREEMPTED[:4],
        *ledger(
            (100, "verdict", {**failed, "answer": "again"}),
            (101, "verdict", {**failed, "answer": 75, "correction": True}),
        ),
    ]
    told = timeline(entries, BEGIN + timedelta(days=1))
    assert spans(told)[-1][2] == told.end_s == 101  # nothing waits after it
    assert [mark.kind for mark in told.marks].count("failed") == 1
    assert not told.attempts[-1].ended.endswith("requeued")
    layout = GpuLayout(gpus_per_node=4, num_nodes=1, trainer=4, engines=4, is_colocated=True)
    assert goodput(entries, [], layout, BEGIN + timedelta(days=1)).queue_s == 10


def test_a_hang_is_marked_with_the_rank_to_blame():
    hang = ledger(
        (
            160,
            "hang",
            {"call": "train_step", "ranks": [2], "hosts": ["n02"], "why": "it reads"},
        ),
        (161, "hang", {"call": "train_step", "ranks": [], "hosts": [], "why": "all are there"}),
    )
    told = timeline(PREEMPTED + hang, BEGIN + timedelta(seconds=170))
    assert [(mark.kind, mark.at_s, mark.text) for mark in told.marks[-2:]] == [
        ("failed", 160, "train_step hangs because of rank 2 on n02: it reads"),
        ("failed", 161, "train_step hangs: all are there"),
    ]


def test_a_recovery_within_an_attempt_is_a_mark_and_does_not_end_the_training():
    details = {"role": "trainer", "seconds": 8.44, "steps_again": 2, "cause": "actor-1 died"}
    entry = {**PREEMPTED[3], "event": "recovered", "attempt": None, **details}
    told = timeline([*PREEMPTED[:4], entry], BEGIN + timedelta(seconds=70))
    (mark,) = [mark for mark in told.marks if mark.kind == "recovered"]
    assert mark.text == "trainer recovered in 8.4 s, steps trained again: 2: actor-1 died"
    assert spans(told)[-1] == ("training", 50, 70, "0")


def test_a_run_that_is_over_shows_the_loss_of_an_engine_and_its_return():
    details = {"engines": [1, 3], "phase": "generate", "cause": "no answer to the health check"}
    engines = ledger(
        (160, "engine_lost", details),
        (188.8, "recovered", details | {"role": "engine", "seconds": 28.8, "version": 8}),
    )
    told = timeline(PREEMPTED + engines + DONE, BEGIN + timedelta(days=1))
    assert [(mark.kind, mark.at_s, mark.text) for mark in told.marks[-4:-2]] == [
        ("failed", 160, "engines 1, 3 lost: no answer to the health check"),
        ("recovered", 188.8, "engines 1, 3 recovered in 28.8 s: no answer to the health check"),
    ]
    assert [mark.kind for mark in told.marks[-2:]] == ["committed", "done"]
    assert told.attempts[-1].ended == "done"
