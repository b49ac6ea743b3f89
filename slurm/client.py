"""Questions and orders to the controller, each one short command. Works without Slurm's accounting database."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Callable

from slurm.errors import JobError
from slurm.states import JobInfo, JobState, parse_job

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 60.0
POLL_S = 15.0  # every question costs the controller something


def is_available() -> bool:
    """Whether jobs can be submitted from here: sbatch is on PATH and knows a cluster, up or down.

    A machine may have the commands and no cluster: then every command says that it finds no configuration.
    """
    if shutil.which("sbatch") is None:
        return False
    try:
        return "configuration source" not in _slurm("scontrol", "ping").stderr
    except (OSError, subprocess.TimeoutExpired):
        return True


def job_info(job_id: str) -> JobInfo:
    """What the controller knows about a job; state UNKNOWN when it has forgotten it or does not answer."""
    try:
        done = _slurm("scontrol", "--oneliner", "show", "job", _checked(job_id))
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("scontrol show job %s: %s", job_id, error)
        return JobInfo(job_id, JobState.UNKNOWN)
    if done.returncode != 0:
        logger.debug("scontrol show job %s: %s", job_id, done.stderr.strip())
        return JobInfo(job_id, JobState.UNKNOWN)
    return parse_job(done.stdout)


def job_state(job_id: str) -> JobState:
    """The state of a job."""
    return job_info(job_id).state


def wait_for(
    job_id: str, condition: Callable[[JobInfo], bool], *, deadline_s: float, poll_s: float = POLL_S
) -> JobInfo:
    """Ask until ``condition`` holds and return the answer that fulfilled it.

    Raises:
        JobError: at the deadline; holds the last answer.
    """
    end = time.monotonic() + deadline_s
    while not condition(info := job_info(job_id)):
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise JobError(f"job {job_id} did not get there in {deadline_s:g} s; last answer: {info}")
        time.sleep(min(poll_s, left_s))
    return info


def cancel(job_id: str) -> None:
    """End a job for good: our batch script does not requeue after this.

    Raises:
        JobError: Slurm refuses; holds what it said.
    """
    done = _slurm("scancel", _checked(job_id))
    if done.returncode != 0:
        raise JobError(f"scancel {job_id}: {done.stderr.strip()}")


def _checked(job_id: str) -> str:
    if not re.fullmatch(r"\d+(_\d+)?", job_id):
        raise JobError(f"{job_id!r} is not a Slurm job id")
    return job_id


def _slurm(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
