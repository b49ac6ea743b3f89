"""Slurm's commands about the job that this process belongs to. Python 3.6.

Every command is bounded in time. A controller that does not answer gives None or False; nothing
here raises.
"""

import time
from typing import Mapping, Optional, Sequence

from common.attempt import job_name
from slurm.job_id import run_command

STATE_TRIES, STATE_PAUSE_S = 30, 2.0
ARRAY_TRIES = 5
REQUEUE_TRIES, REQUEUE_S = 5, 60.0
"""More patience than for a query: without the requeue the run ends."""
UPDATE_TRIES, UPDATE_PAUSE_S = 10, 0.5
MARGIN_S = 5
"""Time before the end of the job that is left for the requeue itself."""


def is_task_of_array(environ: Mapping[str, str]) -> bool:
    """Whether this job is a task of an array, and not only submitted from within one.

    Such a job has the variables of that array. Without an answer of squeue they are believed.
    """
    job, array = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_JOB_ID", "")
    if not environ.get("SLURM_ARRAY_TASK_ID") or job == array:  # the last task has its number
        return bool(array)
    argv = ["squeue", "--noheader", f"--jobs={job}", "--format=%i"]
    for attempt in range(ARRAY_TRIES):
        if attempt:
            time.sleep(STATE_PAUSE_S)
        answer = run_command(argv, environ) or ""
        if answer.strip():
            return "_" in answer
    return True


class SlurmJob:
    """This job.

    Attributes:
        name: its id for Slurm's commands, see ``common.attempt``.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.name = job_name(environ)
        self._environ = dict(environ)

    def end_time(self) -> Optional[float]:
        """When Slurm ends the job, in seconds since 1970; None if it does not say."""
        answer = self._squeue("%e")
        return float(answer) if answer.isdigit() and int(answer) > 0 else None

    def seconds_within(self, seconds: int) -> int:
        """``seconds``, or less if the job ends sooner; at least 1."""
        end = self.end_time()
        if end is None:
            return seconds
        left = int(end - time.time()) - MARGIN_S
        return max(1, min(seconds, left))

    def state(self) -> str:
        """The job's state in Slurm's words; empty if the controller stays silent."""
        for attempt in range(STATE_TRIES):
            if attempt:
                time.sleep(STATE_PAUSE_S)
            answer = self._squeue("%T")
            if answer:
                return answer
        return ""

    def is_running(self) -> bool:
        """Whether the controller says, in one answer, that the job runs."""
        return self._squeue("%T") == "RUNNING"

    def requeue(self) -> bool:
        """Requeue the job; whether Slurm accepted. Slurm then sends TERM to this process.

        A busy controller may answer too late, or refuse and accept a moment later. A job that does
        not run any more was requeued.
        """
        for attempt in range(REQUEUE_TRIES):
            if attempt:
                time.sleep(STATE_PAUSE_S)
            argv = ["scontrol", "requeue", self.name]
            if run_command(argv, self._environ, timeout_s=REQUEUE_S) is not None:
                return True
            if self._squeue("%T") not in ("", "RUNNING"):
                return True
        return False

    def update(self, *values: str) -> bool:
        """Change values KEY=VALUE of the job, which a requeue has just made pending."""
        for attempt in range(UPDATE_TRIES):
            if attempt:
                time.sleep(UPDATE_PAUSE_S)
            if self._run(["scontrol", "update", f"JobId={self.name}", *values]) is not None:
                return True
        return False

    def forbid_requeue(self) -> None:
        """Make the job's end final, see ``slurm.batch``."""
        self._run(["scontrol", "update", f"JobId={self.name}", "Requeue=0"])

    def _squeue(self, format_: str) -> str:
        argv = ["squeue", "--noheader", f"--jobs={self.name}", f"--format={format_}"]
        return (self._run(argv, SLURM_TIME_FORMAT="%s") or "").strip()

    def _run(self, argv: Sequence[str], **variables: str) -> Optional[str]:
        return run_command(argv, {**self._environ, **variables})
