"""When a job ends according to a fake squeue, and how agents react."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from bootstrap.links.deadline import JobClock, end_after_signal, seconds_for_the_driver
from bootstrap.links.monitor import StopSignals
from common.stop_file import StopMessage, read_deadline, write_stop


def squeue(folder: Path, answer: str) -> None:
    (folder / "squeue").write_text(f'#!/bin/sh\n[ "$SLURM_TIME_FORMAT" = %s ] && echo "{answer}"\n')
    (folder / "squeue").chmod(0o755)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    squeue(tmp_path, "N/A")


def test_what_slurm_answers_counts_and_else_what_it_told_but_no_longer_than_a_grace_period() -> (
    None
):
    assert end_after_signal(500.0, 9000.0, now=100, lead_s=60) == 500
    assert end_after_signal(None, 9000.0, now=100, lead_s=60) == 160
    assert end_after_signal(None, 130.0, now=100, lead_s=60) == 130
    assert end_after_signal(None, None, now=100, lead_s=60) == 160


def test_a_driver_gets_the_time_until_just_before_the_deadline_but_never_hours() -> None:
    assert seconds_for_the_driver(None, grace_s=1, lead_s=600) == 1
    assert seconds_for_the_driver(100, grace_s=1, lead_s=600) == 90
    assert seconds_for_the_driver(7000, grace_s=1, lead_s=600) == 600
    assert seconds_for_the_driver(-5, grace_s=1, lead_s=600) == 1


@pytest.mark.parametrize(
    "text", ["", "by hand", "[]", '{"deadline": "N/A"}', '{"deadline": null}', "{}"]
)
def test_a_stop_file_without_a_deadline_has_none(tmp_path: Path, text: str) -> None:
    assert read_deadline(tmp_path / "STOP") is None
    (tmp_path / "STOP").write_text(text)
    assert read_deadline(tmp_path / "STOP") is None


def test_a_deadline_reads_back(tmp_path: Path) -> None:
    write_stop(tmp_path / "STOP", StopMessage("x", 1.5, deadline=200.0))
    assert read_deadline(tmp_path / "STOP") == 200
    # as the batch script writes it
    (tmp_path / "STOP").write_text('{"reason": "x", "time": 3, "deadline": "300"}')
    assert read_deadline(tmp_path / "STOP") == 300


def test_outside_a_job_nobody_knows_an_end(tmp_path: Path) -> None:
    squeue(tmp_path, "5000")
    clock = JobClock({}, lead_s=60)
    assert asyncio.run(clock.end()) is None
    assert asyncio.run(clock.end_after_signal(ask=True)) is None


def test_an_end_that_was_moved_is_asked_for_and_one_that_nobody_answers_for_was_told(
    tmp_path: Path,
) -> None:
    clock = JobClock(
        {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "9000"}, lead_s=60, now=lambda: 100.0
    )
    assert asyncio.run(clock.end()) == 9000
    squeue(tmp_path, "4000")
    assert asyncio.run(clock.end()) == 4000
    assert asyncio.run(clock.end_after_signal(ask=True)) == 4000
    assert asyncio.run(clock.end_after_signal(ask=False)) == 160
    (tmp_path / "squeue").unlink()
    assert asyncio.run(clock.end_after_signal(ask=True)) == 160


def test_a_host_without_squeue_reads_what_the_batch_host_writes(tmp_path: Path) -> None:
    """An operator extended the limit from 9000 to 20000, then cut it. Containers have no squeue."""
    (tmp_path / "squeue").unlink()
    clock = JobClock(
        {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "9000"},
        lead_s=60,
        attempt_dir=tmp_path,
        now=lambda: 8950.0,
    )
    assert asyncio.run(clock.end()) == 9000  # as of the start
    (tmp_path / "end_time").write_text("20000\n")
    assert asyncio.run(clock.end()) == 20000
    assert asyncio.run(clock.end_after_signal(ask=True)) == 9010  # the lead, not the hours left
    (tmp_path / "end_time").write_text("8990\n")
    assert asyncio.run(clock.end_after_signal(ask=True)) == 8990
    (tmp_path / "end_time").write_text("none\n")  # not the end of the start: the limit was lifted
    assert asyncio.run(clock.end()) is None
    assert asyncio.run(clock.end_after_signal(ask=True)) == 9010


async def test_a_stop_that_is_not_due_any_more_waits_and_one_that_is_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch host writes another end while the agent waits for the first."""
    monkeypatch.setattr("bootstrap.links.deadline.READ_AGAIN_S", 0.01)
    (tmp_path / "squeue").unlink()
    (tmp_path / "end_time").write_text("20000\n")
    clock = JobClock(
        {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1000"},
        lead_s=60,
        attempt_dir=tmp_path,
        now=lambda: 950.0,
    )
    due = asyncio.create_task(clock.until_due())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(due), 0.1)
    (tmp_path / "end_time").write_text("1000\n")
    await asyncio.wait_for(due, 10)


async def test_a_run_without_any_signal_stops_itself_before_its_job_ends_and_only_the_head_does(
    tmp_path: Path,
) -> None:
    """The job ends at 1000 s, the clock is at 950 s and the lead is 60 s; each case has its own
    folder.
    """
    clock = JobClock(
        {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1000"}, lead_s=60, now=lambda: 950.0
    )
    for host in ("node", "head"):
        (tmp_path / host).mkdir()
    node = StopSignals(tmp_path / "node", "n02", clock, is_head=False)
    head = StopSignals(tmp_path / "head", "n01", clock, is_head=True)
    await asyncio.wait_for(head.requested.wait(), 10)
    assert await head.seconds_for_the_driver(600) == 40
    assert not node.requested.is_set()
    said = json.loads((tmp_path / "head/STOP").read_text())
    assert said == {
        "reason": "the job ends in 60 s and no signal arrived",
        "time": 950.0,
        "deadline": 1000.0,
    }
    assert not (tmp_path / "node/STOP").exists()


def signalled(folder: Path) -> StopSignals:
    """The stop request of a head outside Slurm that has just received a signal."""
    stop = StopSignals(folder, "n01", JobClock({}, lead_s=60), is_head=True)
    stop.listen_to(signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    return stop


async def test_a_stop_counts_though_its_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.wait_for(signalled(tmp_path / "gone").requested.wait(), 10)
    assert f"{tmp_path}/gone/STOP cannot be written: No such file" in caplog.text


async def test_a_folder_that_stalls_does_not_hold_up_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats come from the same event loop; after ten seconds without one the node counts as
    lost.
    """
    begun, over = threading.Event(), threading.Event()

    def stalling(*_: object) -> bool:
        begun.set()
        return over.wait(10)

    monkeypatch.setattr("bootstrap.links.monitor.write_stop", stalling)
    stop = signalled(tmp_path)
    assert await asyncio.to_thread(begun.wait, 10)
    assert not stop.requested.is_set()
    over.set()
    await asyncio.wait_for(stop.requested.wait(), 10)


async def test_a_file_system_that_refuses_for_a_moment_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.links.monitor._STOP_POLL_S", 0.01)
    stat, refused = os.stat, threading.Event()

    def stale(path: object, **how: bool) -> os.stat_result:
        if str(path).endswith("STOP") and not refused.is_set():
            refused.set()
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", stale)
    stop = StopSignals(tmp_path, "n01", JobClock({}, lead_s=60), is_head=False)
    assert await asyncio.to_thread(refused.wait, 10)
    (tmp_path / "STOP").write_text("{}")
    await asyncio.wait_for(stop.requested.wait(), 10)


async def test_a_job_that_has_time_is_left_alone(tmp_path: Path) -> None:
    clock = JobClock(
        {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "10000"}, lead_s=60, now=lambda: 950.0
    )
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(clock.until_due(), 0.1)
