"""Submissions in the ledger: recorded before sbatch, with their outcome after it. Python 3.6.

Slurm may have accepted a job although sbatch says nothing, prints an error or does not come back.
A submission without an outcome is therefore neither done nor failed: it is unknown, and looked up
by its batch file until Slurm says what became of it. While it is unknown nothing else is submitted
in its place.

    submitting   file, outcome (the event that will name the job), details, clusters, known, at
    submitted, chained, fleet, sandboxes   the job, with its file
    rejected     file, reason: no job was made
"""

import re
import time
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence

from common.ledger import Entry, Ledger
from slurm.job_id import find_by_script, number_of

ID_KEYS = {"submitted": "job_id", "chained": "job_id", "fleet": "array", "sandboxes": "array"}
"""Key of the job's id in each event that ends a submission."""
OF_THE_RUN = ("submitted", "chained")
LOST_ANSWER = re.compile(
    r"timed out|(?:receive|send|shutdown) failure|zero bytes|message (?:receive|send)|"
    r"connection reset|broken pipe|not connected|unexpected message|header lengths|message length",
    re.IGNORECASE,
)
"""sbatch's errors after which slurmctld may have the job (slurm, src/common/slurm_errno.c)."""
REFUSAL = re.compile(r"^\w+: (?:error|fatal): ", re.MULTILINE)
"""sbatch's own errors; a script of the site in its place writes others."""
FIRST_SIGNAL_CODE = 128
LOOKUP_S, LOOKUP_PAUSE_S = 15.0, 1.0
"""How long the job of a lost answer is looked up before its outcome is called unknown."""
SETTLE_S = 120.0
"""A controller that was busy or restarting may execute a request this late (MessageTimeout is 10 s
by default); after that, a job that squeue does not show does not exist."""
RECHECK_S = 3.0
"""Time between two answers of squeue before a submission counts as rejected."""


class Submission(NamedTuple):
    """A submission whose outcome is not known.

    Attributes:
        file: the batch file that sbatch got.
        outcome: the event that will name its job, a key of ``ID_KEYS``.
        details: further values of that event.
        clusters: where it was submitted; empty: the cluster of this host.
        known: numbers of jobs of this file from before.
        at: time of the submission, in seconds since 1970.
    """

    file: str
    outcome: str
    details: Mapping[str, Any] = {}
    clusters: str = ""
    known: Sequence[str] = ()
    at: float = 0.0

    @property
    def is_of_the_run(self) -> bool:
        """Whether it is a job of the run itself, not of engines or sandboxes."""
        return self.outcome in OF_THE_RUN


def announce(ledger: Ledger, submission: Submission) -> None:
    """Record a submission before sbatch is called. Raises OSError: then it must not be called."""
    values = dict(submission._asdict(), details=dict(submission.details))
    ledger.append("submitting", **dict(values, known=list(submission.known), at=int(time.time())))


def record(ledger: Ledger, submission: Submission, job: str) -> None:
    """Record the job of a submission. Raises OSError."""
    named = {ID_KEYS[submission.outcome]: job}
    ledger.append(submission.outcome, **named, **submission.details, file=submission.file)


def reject(ledger: Ledger, submission: Submission, reason: str) -> None:
    """Record that a submission made no job. Raises OSError."""
    ledger.append("rejected", file=submission.file, reason=reason)


def may_be_queued(words: str, printed: str, code: int) -> bool:
    """Whether Slurm may have a job although sbatch failed. Pure.

    An sbatch that was killed may have sent its request, and one that refuses says why.

    Args:
        words: what sbatch wrote to standard error.
        printed: the id that it printed before; empty without one.
        code: its exit code; negative, or 128 + N of a shell, after signal N.
    """
    was_killed = code < 0 or code > FIRST_SIGNAL_CODE
    is_silent = not words.strip()
    return bool(printed) or was_killed or is_silent or LOST_ANSWER.search(words) is not None


def look_up(
    file: str,
    environ: Mapping[str, str],
    *,
    seconds: float,
    but: Collection[str] = (),
) -> Optional[List[str]]:
    """``find_by_script``, repeated for a time until there is a job."""
    deadline = time.monotonic() + seconds
    jobs = find_by_script(file, environ, but=but)
    while not jobs and time.monotonic() < deadline:
        time.sleep(LOOKUP_PAUSE_S)
        jobs = find_by_script(file, environ, but=but)
    return jobs


def is_refused(words: str, printed: str, code: int, jobs: Optional[Sequence[str]]) -> bool:
    """Whether a failed sbatch certainly left no job. Pure.

    ``jobs``: what ``look_up`` returned. See ``may_be_queued``.
    """
    if jobs or may_be_queued(words, printed, code):
        return False
    return jobs is not None or REFUSAL.search(words) is not None


def unknown_submissions(entries: Sequence[Entry]) -> List[Submission]:
    """Submissions of a ledger whose outcome is not known. Pure.

    A job of the run that has started answers for the submission before it.
    """
    waiting: Dict[str, Submission] = {}
    jobs = set()
    for entry in entries:
        event, file = entry["event"], str(entry.get("file", ""))
        job = number_of(str(entry.get("job_id", "")))
        if event == "submitting" and entry.get("outcome") in ID_KEYS:
            values = {name: entry[name] for name in Submission._fields if name in entry}
            waiting[file] = Submission(**values)
        elif event == "rejected" or event in ID_KEYS:
            waiting.pop(file, None)
        elif event == "attempt" and job not in jobs:
            waiting = {file: one for file, one in waiting.items() if not one.is_of_the_run}
        jobs |= {job} if job else set()
    return list(waiting.values())


def settle(
    ledger: Ledger, environ: Mapping[str, str], *, gives_up: bool = False
) -> List[Submission]:
    """Look up the submissions of a ledger whose outcome is not known; return those still unknown.

    Args:
        environ: for squeue.
        gives_up: record a submission that is older than ``SETTLE_S`` and of which squeue shows no
            job, twice, as rejected. Takes ``RECHECK_S`` then.
    """
    still = []
    try:
        entries = ledger.read()
    except OSError:  # of another user
        return []
    for one in unknown_submissions(entries):
        jobs = _find(one, entries, environ)
        if jobs == [] and gives_up and time.time() - one.at >= SETTLE_S:
            time.sleep(RECHECK_S)
            jobs = _find(one, entries, environ)
            if jobs == [] and _succeeds(reject, ledger, one, "squeue shows no job of this file"):
                continue
        if not jobs or not all([_succeeds(record, ledger, one, job) for job in jobs]):
            still.append(one)
    return still


def explain(submission: Submission) -> str:
    """Say that the outcome of a submission is unknown, and what to do. Pure but for the clock."""
    age_s = max(0, time.time() - submission.at)
    wait_s = max(0, int(SETTLE_S - age_s) + 1)
    when = f"in {wait_s} s" if wait_s else "when squeue answers"
    return (
        f"a submission {age_s:.0f} s ago had no answer, and its job ({submission.file}) may be "
        f"queued or arrive in the queue; try again {when}"
    )


def _find(
    one: Submission, entries: Sequence[Entry], environ: Mapping[str, str]
) -> Optional[List[str]]:
    known = {number_of(str(entry["job_id"])) for entry in entries if entry.get("job_id")}
    known = {number.partition("_")[0] for number in known}
    environ = dict(environ, SBATCH_CLUSTERS=one.clusters)
    return find_by_script(one.file, environ, but={*known, *one.known})


def _succeeds(act: Any, *arguments: Any) -> bool:
    try:
        act(*arguments)
    except OSError:  # a read-only copy: the outcome stays unknown there
        return False
    return True
