"""Slurm's commands about the job that this process belongs to. Python 3.6.

Every command is bounded in time. A controller that does not answer gives None or False; nothing
here raises.
"""

import math
import re
import subprocess
import sys
import time
from typing import Mapping, NamedTuple, Optional, Sequence

from common.attempt import job_name
from slurm.job_id import run_command, seconds_in

STATE_TRIES, STATE_PAUSE_S = 30, 2.0
ARRAY_TRIES = 5
REQUEUE_TRIES, REQUEUE_S = 5, 60.0
"""More patience than for a query: without the requeue the run ends."""
UPDATE_TRIES, UPDATE_PAUSE_S = 10, 0.5
MARGIN_S = 5
"""Time before the end of the job that is left for the requeue itself."""
QUERY_S, QUERY_NEAR_S = 600.0, 30.0
"""Intervals between queries of the end of the job: usual, and before a stop request is due."""
REQUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED")
"""States of a job that is to start again."""
RUNS = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_REFUSED = re.compile("disabled|denied|not permitted", re.IGNORECASE)
"""scontrol's errors that a repetition does not change (slurm_errno.c: ESLURM_DISABLED,
ESLURM_ACCESS_DENIED)."""


class Record(NamedTuple):
    """What Slurm has recorded of this job; None: it did not say.

    Attributes:
        num_restarts: how often it was requeued.
        may_requeue: whether it may be requeued; sites and options turn that off.
        limit_s: its time limit, which a preemption does not change; None also without a limit.
    """

    num_restarts: Optional[int] = None
    may_requeue: Optional[bool] = None
    limit_s: Optional[int] = None


class Refusal(NamedTuple):
    """Why a job was not requeued. ``is_final``: Slurm answered, and does not requeue it."""

    words: str
    is_final: bool


def seconds_to_query(now: float, end: Optional[float], signal_lead_s: float) -> float:
    """Seconds until the end of the job is queried again: an operator may move it. Pure.

    The last queries are close to the time at which a stop request would be due, so that an
    extension is known by then.
    """
    if end is None:
        return QUERY_S
    return max(QUERY_NEAR_S, min(QUERY_S, end - signal_lead_s - 2 * QUERY_NEAR_S - now))


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
        """When Slurm ends the job, in seconds since 1970; None if it does not say.

        Infinity: the job has no time limit, which an operator may give and take.
        """
        answer = self._squeue("--format=%e")
        if answer == "NONE":
            return math.inf
        return float(answer) if answer.isdigit() and int(answer) > 0 else None

    def record(self) -> Record:
        """What Slurm has recorded of the job."""
        words = self._squeue("--Format=RestartCnt,Requeue,TimeLimit").split()
        if len(words) != 3 or not words[0].isdigit() or words[1] not in ("0", "1"):
            return Record()
        return Record(int(words[0]), words[1] == "1", seconds_in(words[2]))

    def seconds_within(self, seconds: int) -> int:
        """``seconds``, or less if the job ends sooner; at least 1."""
        end = self.end_time()
        if end is None or math.isinf(end):
            return seconds
        left = int(end - time.time()) - MARGIN_S
        return max(1, min(seconds, left))

    def state(self) -> str:
        """The job's state in Slurm's words; empty if the controller stays silent."""
        for attempt in range(STATE_TRIES):
            if attempt:
                time.sleep(STATE_PAUSE_S)
            answer = self._squeue("--format=%T")
            if answer:
                return answer
        return ""

    def is_running(self) -> bool:
        """Whether the controller says, in one answer, that the job runs."""
        return self._squeue("--format=%T") == "RUNNING"

    def runs(self, job: str) -> bool:
        """Whether the controller says, in one answer, that another job has its nodes."""
        argv = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
        return (run_command(argv, self._environ, is_quiet=True) or "").strip() in RUNS

    def requeue(self) -> Optional[Refusal]:
        """Requeue the job; None if Slurm accepted. Slurm then sends TERM to this process.

        A busy controller may answer too late, or refuse and accept a moment later. A job that does
        not run any more was requeued.
        """
        words = ""
        for attempt in range(REQUEUE_TRIES):
            if attempt:
                time.sleep(STATE_PAUSE_S)
            failure = self._try_requeue()
            if failure is None or self._squeue("--format=%T") not in ("", "RUNNING"):
                return None
            words = failure
            if _REFUSED.search(words):
                return Refusal(words, is_final=True)
        return Refusal(words, is_final=False)

    def _try_requeue(self) -> Optional[str]:
        """None, or what scontrol says against it, which is also shown."""
        try:
            done = subprocess.run(
                ["scontrol", "requeue", self.name],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                universal_newlines=True,
                errors="replace",
                timeout=REQUEUE_S,
                env=self._environ,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"scontrol: {error}"
        print(done.stderr, end="", file=sys.stderr, flush=True)
        if done.returncode == 0:
            return None
        return " ".join(done.stderr.split()) or f"scontrol: exit code {done.returncode}"

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

    def _squeue(self, fields: str) -> str:
        argv = ["squeue", "--noheader", f"--jobs={self.name}", fields]
        return (self._run(argv, SLURM_TIME_FORMAT="%s") or "").strip()

    def _run(self, argv: Sequence[str], **variables: str) -> Optional[str]:
        return run_command(argv, {**self._environ, **variables})
