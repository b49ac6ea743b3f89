"""Parse answers of squeue. tests/cluster/test_verbs.py runs the real squeue."""

import pytest

from slurm import queue as module
from slurm.client import job_info
from slurm.errors import JobError
from slurm.job_id import seconds_in
from slurm.queue import FORGOTTEN, QueueEntry, parse_queue, queue
from slurm.states import JobInfo, JobState, parse_job, parse_state


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
    assert seconds_in(text) == seconds


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


RUNNING = (
    "JobId=12 JobName=rlpost UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901748 Nice=0 Account=(null) "
    "QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 "
    "ExitCode=0:0 RunTime=00:00:03 Partition=low ReqNodeList=(null) ExcNodeList=(null) NodeList=n[01-02] BatchHost=n01 "
    "Comment=JobState=FAILED JobState=FAILED\n"
)
PENDING = "JobId=13 JobState=PENDING Reason=BeginTime Restarts=1 ExitCode=0:0 ReqNodeList=(null) NodeList=(null)\n"


def test_a_job_is_read_from_one_line() -> None:
    """The first value of a key counts, so a comment cannot override it."""
    assert parse_job(RUNNING) == JobInfo("12", JobState.RUNNING, 2, "None", "n[01-02]", 0)
    assert parse_job(PENDING) == JobInfo("13", JobState.PENDING, 1, "BeginTime", "", 0)


@pytest.mark.parametrize(
    "text", ["", "slurm_load_jobs error: Invalid job id specified\n", "JobState=NEWFANGLED"]
)
def test_what_is_not_understood_is_unknown_and_not_over(text: str) -> None:
    state = parse_job(text).state
    assert state is JobState.UNKNOWN
    assert not state.is_over


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 0", JobState.CANCELLED),
        ("RUNNING+", JobState.RUNNING),
        ("NODE_FAIL\n", JobState.NODE_FAIL),
        ("EXPEDITING", JobState.EXPEDITING),
    ],
)
def test_states_are_read_as_every_command_writes_them(text: str, state: JobState) -> None:
    assert parse_state(text) is state


def test_what_is_no_job_id_never_reaches_a_command() -> None:
    with pytest.raises(JobError, match="--help"):
        job_info("--help")
