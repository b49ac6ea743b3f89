"""Real answers of Slurm 22.05."""

from __future__ import annotations

import pytest

from slurm.client import job_info
from slurm.errors import JobError
from slurm.states import JobInfo, JobState, parse_job, parse_state

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
