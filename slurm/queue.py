"""Query the state of many jobs with one command. For commands on one job see ``client``.

Input: job ids. Output: ``QueueEntry`` values. The number of commands is independent of the number of jobs and nodes,
and slurmdbd is not needed. The state is UNKNOWN if the controller does not answer or no longer knows the job
(MinJobAge, usually five minutes).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slurm.client import COMMAND_TIMEOUT_S
from slurm.states import JobState, is_job_id, parse_state

# man squeue: id, state, time left, expected start, nodes, reason; the reason is last because it is prose.
_FORMAT = "%i|%T|%L|%S|%N|%r"
FORGOTTEN = "Slurm has forgotten the job, or never knew it"
_TIME_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One job: ``nodelist`` is compact, ``reason`` says why it waits, ``expected_start`` is Slurm's text or empty."""

    job_id: str
    state: JobState
    time_left_s: int | None = None
    expected_start: str = ""
    nodelist: str = ""
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """The job will not run again unless somebody requeues it; one that the controller has forgotten is over."""
        return self.state.is_over or self.reason == FORGOTTEN


def parse_queue(text: str) -> dict[str, QueueEntry]:
    """The answer of ``squeue`` in our format, by job id; lines of another shape are left out."""
    entries = {}
    for line in text.splitlines():
        words = line.strip().split("|", 5)
        if len(words) != 6:
            continue
        job_id, state, left, start, nodes, reason = (word.strip() for word in words)
        start = "" if start == "N/A" else start
        reason = "" if reason == "None" else reason
        entries[job_id] = QueueEntry(job_id, parse_state(state), seconds_left(left), start, nodes, reason)
    return entries


def seconds_left(text: str) -> int | None:
    """``1-02:03:04`` in seconds; None for NOT_SET, UNLIMITED and INVALID."""
    match = _TIME_LEFT.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def queue(job_ids: Collection[str]) -> dict[str, QueueEntry]:
    """What is known of each of these jobs, all in one ``squeue``; an entry for every id, UNKNOWN at worst."""
    asked = sorted(filter(is_job_id, job_ids))
    found, why = _answer(asked) if asked else ({}, FORGOTTEN)
    return {job_id: found.get(job_id, QueueEntry(job_id, JobState.UNKNOWN, reason=why)) for job_id in job_ids}


def _answer(asked: Sequence[str]) -> tuple[dict[str, QueueEntry], str]:
    """What the controller knows, and why there is nothing of the others."""
    try:
        done = _command("squeue", "--noheader", "--states=all", f"--jobs={','.join(asked)}", f"--format={_FORMAT}")
    except FileNotFoundError:
        return {}, "there is no squeue here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"squeue does not answer: {error}"
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        return {}, f"squeue does not answer: {' '.join(done.stderr.split())}"
    return parse_queue(done.stdout), FORGOTTEN


def _command(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    return subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=environ)
