"""When a job ends, with a squeue of our own making, and what agents make of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bootstrap.deadline import (
    JobClock,
    deadline_of,
    end_after_signal,
    seconds_for_the_driver,
    stop_text,
)
from bootstrap.supervise import StopRequest


def squeue(folder: Path, answer: str) -> None:
    (folder / "squeue").write_text(f'#!/bin/sh\n[ "$SLURM_TIME_FORMAT" = %s ] && echo "{answer}"\n')
    (folder / "squeue").chmod(0o755)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    squeue(tmp_path, "N/A")


def test_what_slurm_answers_counts_and_else_what_it_told_but_no_longer_than_a_grace_period() -> None:
    assert end_after_signal(500.0, 9000.0, now=100, lead_s=60) == 500
    assert end_after_signal(None, 9000.0, now=100, lead_s=60) == 160
    assert end_after_signal(None, 130.0, now=100, lead_s=60) == 130
    assert end_after_signal(None, None, now=100, lead_s=60) == 160


def test_a_driver_gets_the_time_until_just_before_the_deadline_but_never_hours() -> None:
    assert seconds_for_the_driver(None, grace_s=1, lead_s=600) == 1
    assert seconds_for_the_driver(100, grace_s=1, lead_s=600) == 90
    assert seconds_for_the_driver(7000, grace_s=1, lead_s=600) == 600
    assert seconds_for_the_driver(-5, grace_s=1, lead_s=600) == 1


@pytest.mark.parametrize("text", ["", "by hand", "[]", '{"deadline": "N/A"}', '{"deadline": null}', "{}"])
def test_a_stop_file_without_a_deadline_has_none(tmp_path: Path, text: str) -> None:
    assert deadline_of(tmp_path / "STOP") is None
    (tmp_path / "STOP").write_text(text)
    assert deadline_of(tmp_path / "STOP") is None


def test_a_deadline_reads_back(tmp_path: Path) -> None:
    (tmp_path / "STOP").write_text(stop_text("x", now=1.5, deadline=200.0))
    assert deadline_of(tmp_path / "STOP") == 200
    (tmp_path / "STOP").write_text('{"reason": "x", "time": 3, "deadline": "300"}')  # as the batch script writes it
    assert deadline_of(tmp_path / "STOP") == 300


def test_outside_a_job_nobody_knows_an_end(tmp_path: Path) -> None:
    squeue(tmp_path, "5000")
    clock = JobClock({}, lead_s=60)
    assert asyncio.run(clock.end()) is None
    assert asyncio.run(clock.end_after_signal(ask=True)) is None


def test_an_end_that_was_moved_is_asked_for_and_one_that_nobody_answers_for_was_told(tmp_path: Path) -> None:
    clock = JobClock({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "9000"}, lead_s=60, now=lambda: 100.0)
    assert asyncio.run(clock.end()) == 9000
    squeue(tmp_path, "4000")
    assert asyncio.run(clock.end()) == 4000
    assert asyncio.run(clock.end_after_signal(ask=True)) == 4000
    assert asyncio.run(clock.end_after_signal(ask=False)) == 160
    (tmp_path / "squeue").unlink()
    assert asyncio.run(clock.end_after_signal(ask=True)) == 160


@pytest.mark.parametrize("is_head", [True, False])
def test_a_run_without_any_signal_stops_itself_before_its_job_ends_and_only_the_head_does(
    tmp_path: Path, is_head: bool
) -> None:
    """The end is told at 1000 s, the clock stands at 950 and the lead is 60."""

    async def whole() -> bool:
        clock = JobClock({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1000"}, lead_s=60, now=lambda: 950.0)
        stop = StopRequest(tmp_path, "n01", clock, is_head=is_head)
        try:
            await asyncio.wait_for(stop.requested.wait(), 10 if is_head else 1)
        except TimeoutError:
            return False
        assert stop.seconds_for_the_driver(600) == 40
        return True

    assert asyncio.run(whole()) is is_head
    if is_head:
        said = json.loads((tmp_path / "STOP").read_text())
        assert said == {"reason": "the job ends in 60 s, and no signal came", "time": 950.0, "deadline": 1000.0}


def test_a_job_that_has_time_is_left_alone(tmp_path: Path) -> None:
    async def whole() -> None:
        clock = JobClock({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "10000"}, lead_s=60, now=lambda: 950.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(clock.until_due(), 0.3)

    asyncio.run(whole())
