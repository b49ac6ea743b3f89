"""Query the state of many jobs with one command. For commands on one job see ``client``.

There is one command for each cluster. Input: job ids. Output: ``QueueEntry`` values. The number of commands is
independent of the number of jobs and nodes, and slurmdbd is not needed. The state is UNKNOWN if the
controller does not answer or no longer knows the job (MinJobAge, usually five minutes).
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from slurm.client import run_slurm
from slurm.job_id import cluster_of, cluster_option, is_job_id, number_of, seconds_in
from slurm.states import JobState, parse_state

# man squeue: id, state, time left, expected start, nodes; last the reason, which is free text.
_FORMAT = "%i|%T|%L|%S|%N|%r"
FORGOTTEN = "Slurm has forgotten the job, or never knew it"


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One job of the queue.

    ``nodelist`` is compact, ``reason`` is why the job is pending, ``expected_start`` is Slurm's
    text or empty.
    """

    job_id: str
    state: JobState
    time_left_s: int | None = None
    expected_start: str = ""
    nodelist: str = ""
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended; a job that the controller has purged counts as ended."""
        return self.state.is_over or self.reason == FORGOTTEN


def parse_queue(text: str) -> dict[str, QueueEntry]:
    """Parse the output of ``squeue`` in our format into entries by job id; ignore other lines."""
    entries = {}
    for line in text.splitlines():
        words = line.strip().split("|", 5)
        if len(words) != 6:
            continue
        job_id, state, left, start, nodes, reason = (word.strip() for word in words)
        start = "" if start == "N/A" else start
        reason = "" if reason == "None" else reason
        entries[job_id] = QueueEntry(
            job_id, parse_state(state), seconds_in(left), start, nodes, reason
        )
    return entries


def queue(job_ids: Collection[str]) -> dict[str, QueueEntry]:
    """Query these jobs with one ``squeue`` for each cluster; ids without an entry are UNKNOWN."""
    unknown = {job: QueueEntry(job, JobState.UNKNOWN, reason=FORGOTTEN) for job in job_ids}
    valid_ids = sorted(filter(is_job_id, job_ids))
    found: dict[str, QueueEntry] = {}
    for cluster in sorted(set(map(cluster_of, valid_ids))):
        found |= _query([job for job in valid_ids if cluster_of(job) == cluster])
    return unknown | found


def _query(job_ids: Sequence[str]) -> dict[str, QueueEntry]:
    """Entries of jobs of one cluster; those that squeue does not show say why."""
    shown, why = _query_controller(job_ids)
    entries = {}
    for job in job_ids:
        entry = shown.get(number_of(job))
        if entry is None:
            entries[job] = QueueEntry(job, JobState.UNKNOWN, reason=why)
        else:
            entries[job] = replace(entry, job_id=job)
    return entries


def _query_controller(job_ids: Sequence[str]) -> tuple[dict[str, QueueEntry], str]:
    """Entries that the controller knows, by number, and the reason why the others have none."""
    jobs = f"--jobs={','.join(map(number_of, job_ids))}"
    try:
        # --array: one line for each task of an array, also while all of them are pending
        options = ("--noheader", "--array", "--states=all", jobs, f"--format={_FORMAT}")
        done = run_slurm("squeue", *cluster_option(job_ids[0]), *options)
    except FileNotFoundError:
        return {}, "there is no squeue here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"squeue does not answer: {error}"
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        # squeue prints a chain of errors; the last one names the cause
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {}, f"squeue does not answer: {said[-1].removeprefix('squeue: ')}"
    return parse_queue(done.stdout), FORGOTTEN
