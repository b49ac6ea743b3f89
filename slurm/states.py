"""Parse ``scontrol show job`` into ``JobInfo``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    """Slurm's job states that matter here (man squeue, JOB STATE CODES); all others are UNKNOWN."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    EXPEDITING = "EXPEDITING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    UNKNOWN = "UNKNOWN"

    @property
    def is_over(self) -> bool:
        """Whether the job has ended; only a requeue would run it again."""
        alive = ("PENDING", "CONFIGURING", "EXPEDITING", "RUNNING", "SUSPENDED", "COMPLETING")
        return self not in (*alive, "UNKNOWN")


@dataclass(frozen=True, slots=True)
class JobInfo:
    """One job.

    ``exit_code``: of the batch script; ``nodelist``: compact, empty while it is pending.
    """

    job_id: str
    state: JobState
    num_restarts: int = 0
    reason: str = ""
    nodelist: str = ""
    exit_code: int = 0


def parse_state(text: str) -> JobState:
    """Parse a state of squeue, scontrol or sacct (``CANCELLED by 0``, ``RUNNING+``)."""
    word = re.split(r"[ +,]", text.strip(), maxsplit=1)[0]
    return JobState(word) if word in JobState.__members__ else JobState.UNKNOWN


def parse_job(text: str) -> JobInfo:
    """Parse the first line of ``scontrol --oneliner show job``; state UNKNOWN if there is none."""
    line = next(iter(text.splitlines()), "")
    # Values such as Comment may contain blanks and even KEY=VALUE: use the first value of each key.
    values: dict[str, str] = {}
    for key, value in re.findall(r"(?:^|\s)(\w+)=(\S*)", line):
        values.setdefault(key, value)
    nodelist = values.get("NodeList", "")
    return JobInfo(
        job_id=values.get("JobId", ""),
        state=parse_state(values.get("JobState", "")),
        num_restarts=int(values.get("Restarts", "0")),
        reason=values.get("Reason", ""),
        nodelist="" if nodelist == "(null)" else nodelist,
        exit_code=int(values.get("ExitCode", "0:0").partition(":")[0]),
    )
