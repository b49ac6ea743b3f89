"""Which deaths of a driver are followed by a restart inside the attempt."""

import json
import signal

import pytest

from bootstrap.agent.driver_restarts import WINDOW_S, DriverDeath, last_step, reason_to_end
from common.exit_codes import (
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
)

KILLED = -signal.SIGKILL


def judged(code, *, at=1000.0, step=5, earlier=(), most=3, is_ending=False):
    return reason_to_end(
        DriverDeath(code, at, step), earlier, max_restarts=most, is_ending=is_ending
    )


@pytest.mark.parametrize("code", [KILLED, -signal.SIGSEGV, -signal.SIGABRT, EXIT_CRASHED])
def test_a_crash_is_followed_by_a_restart(code):
    assert judged(code) is None


@pytest.mark.parametrize(
    "code",
    [EXIT_DONE, EXIT_FAILED, EXIT_CONFIG, EXIT_PREEMPTED, -signal.SIGTERM, -signal.SIGINT, 127],
)
def test_a_deliberate_end_is_not(code):
    assert judged(code) == "the driver ended by itself"


def test_nothing_is_started_again_while_the_attempt_ends_or_without_a_budget():
    assert judged(KILLED, is_ending=True) == "the attempt is ending"
    assert "0 times already" in judged(KILLED, most=0)
    deaths = tuple(DriverDeath(KILLED, 10_000.0 * number, number) for number in range(3))
    assert judged(KILLED, at=90_000.0, earlier=deaths[:2]) is None
    assert "3 times already" in judged(KILLED, at=90_000.0, earlier=deaths)


def test_a_second_death_needs_a_trained_step_or_time_since_the_first():
    first = (DriverDeath(KILLED, 1000.0, 5),)
    assert "2 times within 600 s" in judged(KILLED, at=1100.0, step=5, earlier=first)
    assert judged(KILLED, at=1100.0, step=6, earlier=first) is None
    assert judged(KILLED, at=1000.0 + WINDOW_S, step=5, earlier=first) is None


def test_a_resume_that_trains_steps_again_is_no_progress():
    """The metrics of repeated steps are written again: a death at step 3 of 5 is no progress."""
    first = (DriverDeath(KILLED, 1000.0, 5),)
    assert judged(KILLED, at=1100.0, step=3, earlier=first) is not None
    second = (*first, DriverDeath(KILLED, 1100.0, 7))
    assert judged(KILLED, at=1200.0, step=6, earlier=second) is not None


def test_the_last_step_is_that_of_the_last_complete_line(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) == -1
    lines = [json.dumps({"step": step, "reward": 0.5}) for step in range(4)]
    metrics.write_text("\n".join(lines) + "\n")
    assert last_step(metrics) == 3
    metrics.write_text("\n".join([*lines, '{"step": 4, "rew']))
    assert last_step(metrics) == 3
    metrics.write_text("damaged\n[]\n")
    assert last_step(metrics) == -1
