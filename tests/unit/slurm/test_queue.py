"""Parse answers of squeue. tests/cluster/test_verbs.py runs the real squeue."""

import pytest

from slurm import queue as module
from slurm.queue import FORGOTTEN, QueueEntry, parse_queue, queue, seconds_left
from slurm.states import JobState


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("9:58", 598),
        ("1:00:00", 3600),
        ("1-02:03:04", 93784),
        ("NOT_SET", None),
        ("UNLIMITED", None),
        ("INVALID", None),
    ],
)
def test_time_left_is_read_in_every_form(text, seconds):
    assert seconds_left(text) == seconds


def test_a_reason_may_hold_anything_and_a_state_that_nobody_knows_is_unknown():
    text = (
        "12|PENDING|1:00|2026-11-20T15:00:00||ReqNodeNotAvail, Reserved for maintenance | see mail\n"
        "13|RUNNING|59:00|2026-11-20T14:00:00|n[01-02]|None\n"
        "14|SPECIAL_EXIT|0:00|N/A||None\n"
        "slurm_load_jobs error: something\n"
    )
    reason = "ReqNodeNotAvail, Reserved for maintenance | see mail"
    assert parse_queue(text) == {
        "12": QueueEntry("12", JobState.PENDING, 60, "2026-11-20T15:00:00", "", reason),
        "13": QueueEntry("13", JobState.RUNNING, 3540, "2026-11-20T14:00:00", "n[01-02]", ""),
        "14": QueueEntry("14", JobState.UNKNOWN, 0, "", "", ""),
    }


def squeue(tmp_path, monkeypatch, text):
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_a_forgotten_job_is_over_and_a_silent_controller_ends_nothing(tmp_path, monkeypatch):
    squeue(
        tmp_path, monkeypatch, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    entry = queue(["7"])["7"]
    assert (entry.state, entry.reason, entry.is_over) == (JobState.UNKNOWN, FORGOTTEN, True)
    squeue(
        tmp_path,
        monkeypatch,
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    )
    entry = queue(["7"])["7"]
    assert (entry.state, entry.is_over) == (JobState.UNKNOWN, False)
    assert "Unable to contact slurm controller" in entry.reason


def test_without_slurm_nothing_is_known_and_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    entry = queue(["7"])["7"]
    assert (entry.state, entry.is_over) == (JobState.UNKNOWN, False)


def test_many_jobs_are_one_command_and_what_is_no_id_is_not_asked(tmp_path, monkeypatch):
    commands = []

    def answer(*argv):
        commands.append(argv)
        return module.subprocess.CompletedProcess(argv, 0, "1|RUNNING|1:00|N/A|n1|None\n", "")

    monkeypatch.setattr(module, "run_slurm", answer)
    found = queue(["1", "2", "; rm -rf"])
    assert [argv[0] for argv in commands] == ["squeue"] and "--jobs=1,2" in commands[0]
    assert [str(found[job].state) for job in ("1", "2", "; rm -rf")] == [
        "RUNNING",
        "UNKNOWN",
        "UNKNOWN",
    ]
