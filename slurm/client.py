"""Slurm commands for one job: submit, cancel, requeue, query. For many jobs at once see ``queue``.

Input: job ids, scripts. Output: values, or a SlurmError with Slurm's message. Needs no accounting database.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from slurm.errors import JobError, SubmitError
from slurm.states import JobInfo, JobState, is_job_id, parse_job

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


def cancel(job_id: str) -> None:
    """End a job for good: our batch script does not requeue after this.

    Raises:
        JobError: Slurm refuses or does not answer; holds what it said.
    """
    done = _order("scancel", _checked(job_id))
    if done.returncode != 0:
        raise JobError(f"scancel {job_id}: {done.stderr.strip()}")


def ask_to_requeue(job_id: str) -> None:
    """Tell the batch script of a running job to save, requeue and go on: the signal that announces a time limit.

    Raises:
        JobError: Slurm refuses or does not answer; holds what it said.
    """
    done = _order("scancel", "--batch", "--signal=USR2", _checked(job_id))
    # scancel leaves with 0 after "Job/step already completing or completed".
    if done.returncode != 0 or "error" in done.stderr:
        raise JobError(f"job {job_id} cannot be asked to save and go on: {done.stderr.strip()}")


def expected_start(script: Path, environ: Mapping[str, str]) -> str:
    """When and where Slurm would start this script; submits nothing.

    Args:
        environ: of sbatch, which sends it to the controller with the question, as with a job.

    Raises:
        SubmitError: sbatch would not take it; holds what it said.
        JobError: there is no sbatch here, or it does not answer.
    """
    done = _order("sbatch", "--test-only", str(script), environ=environ)
    if done.returncode != 0:
        raise SubmitError(f"sbatch would not take the job: {done.stderr.strip()}")
    return done.stderr.strip().removeprefix("sbatch: ")


def _checked(job_id: str) -> str:
    if not is_job_id(job_id):
        raise JobError(f"{job_id!r} is not a Slurm job id")
    return job_id


def _order(*argv: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command whose answer is needed. Raises JobError when there is none."""
    try:
        return _slurm(*argv, environ=environ)
    except FileNotFoundError:
        raise JobError(f"there is no {argv[0]} on this host; call this where Slurm's commands are") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(
            f"{argv[0]} does not answer ({error}); does scontrol ping say that the controller is up?"
        ) from None


def _slurm(*argv: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=environ)
