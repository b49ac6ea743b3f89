"""Decide after an attempt whether to requeue, and which hosts to exclude. Runs on the batch host.

Input: the ledger, the files of the attempt, the budgets. Output: lines in the ledger and the
decision. Reasons go to the log. If the agents wrote no verdict, this module derives one from what
they left (``evidence``) and writes it.

``decide`` is pure. Only the standard library of Python 3.6, because batch hosts run the system's
Python.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from common.attempt import EXCLUDE_FILE, VERDICT_FILE, VERDICT_JSON
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED
from common.files import text_or_empty
from common.host_lists import HostListError, expand
from common.ledger import Entry, Ledger
from common.scrape_targets import empty_targets
from slurm.evidence import find_cause, keep_freed_hosts, leave_verdict, mask, resume_point
from slurm.image import describe
from slurm.job_id import cluster_option, number_of, run_command
from slurm.variables import submission_environment

MAX_CAUSE_CHARS = 2000

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Budgets(NamedTuple):
    """Limits on automatic restarts of a run, counted since it was submitted."""

    max_preemptions: int
    max_failures: int
    max_stalled_attempts: int


class Ending(NamedTuple):
    """How an attempt ended.

    ``verdict`` is the agents' verdict or ``none``, ``code`` srun's exit code.
    """

    verdict: str
    code: int = 0
    terminated: bool = False  # the batch shell got TERM
    no_restart: str = ""  # why it must not restart, with the remedy; empty if it may


class RestartDecision(NamedTuple):
    """What follows an attempt: exit with ``code``, or requeue if ``code`` is None.

    ``is_final``: this job must not start again. After TERM Slurm itself may have preempted it, and
    requeues it.
    """

    code: Optional[int]
    reason: str
    is_final: bool = False
    exclude: Sequence[str] = ()
    """Hosts to exclude from a restart, with those that the job excludes anyway."""


def decide(ending: Ending, entries: Sequence[Entry], budgets: Budgets) -> RestartDecision:
    """Decide whether to requeue; ``entries`` is the ledger before this ending was recorded."""
    answer = _decide(ending, entries, budgets)
    is_over = ending.verdict in ("done", "config") or not ending.terminated
    return answer._replace(is_final=answer.code is not None and is_over)


def _decide(ending: Ending, entries: Sequence[Entry], budgets: Budgets) -> RestartDecision:
    if ending.verdict == "done":
        return RestartDecision(EXIT_DONE, "the run is done")
    if ending.verdict == "config":
        return RestartDecision(EXIT_CONFIG, "not requeued: a restart would fail in the same way")
    is_preempted = ending.verdict == "requeue"
    code = exit_code(ending)
    if ending.terminated:
        return RestartDecision(
            code,
            "not requeued by the batch script, which got TERM; Slurm itself requeues a preempted job",
        )
    if was_cancelled(entries):
        return RestartDecision(code, "not requeued: the run was cancelled")
    if ending.no_restart:
        return RestartDecision(code, f"not requeued: {ending.no_restart}")
    stalled = stalled_attempts(entries)
    if stalled >= budgets.max_stalled_attempts:
        return RestartDecision(
            code, f"not requeued: {stalled} consecutive attempts committed no new checkpoint"
        )
    kind, limit = "failures", budgets.max_failures
    if is_preempted:
        kind, limit = "preemptions", budgets.max_preemptions
    count = count_endings(entries, is_preempted) + 1
    if count > limit:
        return RestartDecision(code, f"not requeued: {kind}: {count}, and max_{kind} is {limit}")
    what = "a preemption" if is_preempted else "a failure"
    return RestartDecision(None, f"requeue after {what} ({count} of {limit})")


def exit_code(ending: Ending) -> int:
    """Exit code of the job if an unfinished attempt is not requeued."""
    return EXIT_PREEMPTED if ending.verdict == "requeue" else ending.code or 1


def since_submission(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Entries after the last submission of the run; its intent (``submitting``) is enough."""
    rejected = {entry.get("file") for entry in _events(entries, "rejected")}
    last = -1
    for index, entry in enumerate(entries):
        if _is_submission(entry) and entry.get("file", "") not in rejected:
            last = index
    return entries[last + 1 :]


def _is_submission(entry: Entry) -> bool:
    is_intent = entry.get("event") == "submitting" and entry.get("outcome") == "submitted"
    return is_intent or entry.get("event") == "submitted"


def was_cancelled(entries: Sequence[Entry]) -> bool:
    """Whether the run was cancelled (``rlpost cancel``) since it was submitted."""
    return any(entry.get("event") == "cancelled" for entry in since_submission(entries))


def count_endings(entries: Sequence[Entry], is_preempted: bool) -> int:
    """Number of earlier attempts that ended in a preemption (or time limit), or in a failure."""
    verdicts = [
        entry.get("verdict")
        for entry in since_submission(entries)
        if entry.get("event") == "verdict" and not entry.get("correction")
    ]
    return sum((verdict == "requeue") == is_preempted for verdict in verdicts)


def stalled_attempts(entries: Sequence[Entry]) -> int:
    """Number of consecutive attempts, including this one, without progress.

    Progress is a checkpoint beyond the newest earlier one or, for an attempt without time to save
    one, a journal that reaches a later step. An attempt without a verdict (its batch host died)
    counts as well.
    """
    stalled, best, newest_job, is_submitted = 0, -1, "", False
    for entry in entries:
        if _is_submission(entry):
            # A job may start before sbatch returns and the submission is recorded.
            has_begun = bool(newest_job) and number_of(str(entry.get("job_id", ""))) == newest_job
            stalled, is_submitted = int(has_begun), True
        elif entry.get("event") == "attempt":
            stalled, newest_job = stalled + 1, entry.get("job_id", "")
        elif entry.get("event") == "started" and is_submitted:
            # Checkpoints may have been removed before resubmission: count from where it starts.
            best, is_submitted = min(best, entry.get("step", best)), False
        elif _reached(entry) > best:
            best, stalled = _reached(entry), 0
    return stalled


def _reached(entry: Entry) -> int:
    """Step that a resume reaches without generation, by checkpoint or journal alone."""
    is_safe = entry.get("event") == "committed" or entry.get("saved") == "journal"
    step = entry.get("step", -1)
    return step if is_safe and isinstance(step, int) else -1


def final_code(entries: Sequence[Entry], job: str) -> Optional[int]:
    """Exit code with which this job has ended for good in an earlier start; None if it has not.

    Slurm 24.05 to 25.11 starts a job again that was preempted once, whatever its exit code, where
    its record cannot be changed.
    """
    jobs = {entry.get("attempt"): entry.get("job_id") for entry in _events(entries, "attempt")}
    newest = _last(since_submission(entries), "verdict")
    if jobs.get(newest.get("attempt")) != job or not newest:
        return None
    is_final = newest.get("final", newest.get("verdict") in ("done", "config"))
    answer = newest.get("answer")
    return answer if is_final and isinstance(answer, int) else None


def open_job(entries: Sequence[Entry], job: str) -> str:
    """Another job whose attempt is the newest and has no verdict; empty if there is none."""
    newest = _last(entries, "attempt")
    ended = {entry.get("attempt") for entry in _events(entries, "verdict")}
    other = str(newest.get("job_id", ""))
    return "" if other == job or newest.get("attempt") in ended else other


def _events(entries: Sequence[Entry], event: str) -> List[Entry]:
    return [entry for entry in entries if entry.get("event") == event]


def _last(entries: Sequence[Entry], event: str) -> Entry:
    return next((entry for entry in reversed(entries) if entry.get("event") == event), {})


def bad_hosts(run_folder: Path) -> List[str]:
    """Sorted hosts from the ``exclude`` files (one host per line) of all attempts."""
    hosts = set()
    for path in run_folder.glob(f"attempts/*/{EXCLUDE_FILE}"):
        for line in path.read_text(errors="replace").splitlines():
            if _HOST.fullmatch(line.strip()):
                hosts.add(line.strip())
            elif line.strip():
                print(f"{path}: {line!r} is not a host name; ignored", file=sys.stderr)
    return sorted(hosts)


def record_start(
    run_folder: Path, attempt: int, job: str, image: str, environ: Mapping[str, str]
) -> bool:
    """Record a new attempt; return False if its job was cancelled, and must not start.

    Slurm lets a batch script requeue a job while the job is being cancelled. Only a cancellation of
    this job counts: the job of a new submission may start before its ``submitted`` line is written.
    """
    ledger = Ledger(run_folder / "ledger.jsonl")
    details: Dict[str, Any] = {
        "attempt": attempt,
        "job_id": job,
        "nodes": environ.get("SLURM_JOB_NODELIST", ""),
        "image": describe(Path(image)) if image else None,
    }
    num_nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if num_nodes.isdecimal():
        details["num_nodes"] = int(num_nodes)
    details["home"] = environ.get("RLPOST_HOME")  # for steps that `rlpost exec` adds to the job
    empty_targets(run_folder)  # of an attempt whose hosts died; nothing of this one serves yet
    ledger.append("attempt", **details, code=_json(run_folder / "code.json"))
    return not any(
        entry.get("event") == "cancelled" and number_of(str(entry.get("job_id", ""))) == job
        for entry in ledger.read()
    )


def record_chained(run_folder: Path, attempt: int, job: str, file: str = "") -> None:
    """Record the job that resumes the run in place of a requeue; ``rlpost cancel`` needs its id.

    Both sides write to the ledger before they read it, so at least one of them sees the other.
    """
    ledger = Ledger(run_folder / "ledger.jsonl")
    ledger.append("chained", attempt=attempt, job_id=job, file=file)
    if was_cancelled(ledger.read()):
        print(
            f"the run was cancelled while the job was submitted: cancelling job {job}",
            file=sys.stderr,
        )
        subprocess.call(["scancel", *cluster_option(job), number_of(job)])


def record_end(
    run_folder: Path,
    attempt: int,
    ending: Ending,
    budgets: Budgets,
    *,
    static: Sequence[str],
    environ: Mapping[str, str],
) -> RestartDecision:
    """Decide what follows an attempt and record it with its verdict.

    Args:
        ending: how the attempt ended; its verdict is replaced by what the attempt's files say.
        static: host lists that the job excludes anyway; Slurm's list is replaced, not added to.
    """
    attempt_dir = run_folder / "attempts" / str(attempt)
    ledger = Ledger(run_folder / "ledger.jsonl")
    verdict = text_or_empty(attempt_dir / VERDICT_FILE) or "none"
    cause = str((_json(attempt_dir / VERDICT_JSON) or {}).get("cause", ""))
    entries = ledger.read()
    if verdict == "none" and not ending.terminated:
        nodes = nodes_of(entries, attempt)
        finding = find_cause(run_folder, attempt_dir, nodes, ending.code)
        verdict, cause = finding.verdict, finding.cause
        leave_verdict(attempt_dir, finding)
    is_newest = (run_folder / "attempts/latest").resolve().name == str(attempt)
    # The driver does so unless it was killed. A newer attempt may serve already.
    for path in empty_targets(run_folder) if is_newest else ():
        print(f"{path} was not emptied; Prometheus reports its targets as down", file=sys.stderr)
    for host in keep_freed_hosts(attempt_dir):
        print(f"{host}: its disk was full and is freed; not excluded", file=sys.stderr)
    cause = mask(run_folder, attempt_dir, cause)[:MAX_CAUSE_CHARS]
    ending = ending._replace(verdict=verdict)
    answer = decide(ending, entries, budgets)
    excluded = bad_hosts(run_folder)
    if answer.code is None and excluded:
        problem = why_too_few([*static, *excluded], environ)
        if problem:
            answer = RestartDecision(exit_code(ending), f"not requeued: {problem}", is_final=True)
    ledger.append(
        "verdict",
        attempt=attempt,
        verdict=verdict,
        cause=cause,
        answer="again" if answer.code is None else answer.code,
        reason=answer.reason,
        exclude=excluded,
        final=answer.is_final,
    )
    if cause and verdict != "done":
        print(f"cause: {cause}", file=sys.stderr)
    outlook = f"; {resume_point(run_folder, entries)}" if answer.code is None else ""
    print(f"{answer.reason}{outlook}; see {attempt_dir}", file=sys.stderr)
    return answer._replace(exclude=(*static, *excluded))


def record_refusal(run_folder: Path, attempt: int, code: int, reason: str) -> None:
    """Correct the decision of an attempt that was to restart and cannot. Raises OSError."""
    ledger = Ledger(run_folder / "ledger.jsonl")
    decided = _last(ledger.read(), "verdict")
    values = {name: decided.get(name) for name in ("verdict", "cause", "exclude")}
    ledger.append(
        "verdict",
        attempt=attempt,
        **values,
        answer=code,
        reason=reason,
        correction=True,
        final=False,
    )


def nodes_of(entries: Sequence[Entry], attempt: int) -> str:
    """Slurm's compact host list of an attempt; empty if the ledger has none."""
    for entry in reversed(entries):
        if entry.get("event") == "attempt" and entry.get("attempt") == attempt:
            return str(entry.get("nodes", ""))
    return ""


def _json(path: Path) -> Optional[Dict[str, Any]]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


ANSWER_S = 10.0


def why_too_few(excluded: Sequence[str], environ: Mapping[str, str]) -> Optional[str]:
    """Why this job cannot run without these hosts, with the remedy; None if it can.

    ``excluded`` holds compact host lists.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    environ = submission_environment(environ)
    scontrol = ["scontrol", "--oneliner", "show", "job", job]
    shown = run_command(scontrol, environ, timeout_s=ANSWER_S) or ""
    partition = _value(shown, "Partition")
    if not partition:
        return None
    sinfo = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%f"]
    listed = run_command(sinfo, environ, timeout_s=ANSWER_S) or ""
    return describe_shortage(shown, listed, excluded)


def describe_shortage(job: str, nodes: str, excluded: Sequence[str]) -> Optional[str]:
    """Message about too few remaining nodes; None if there are enough. Pure.

    Args:
        job: a line of ``scontrol --oneliner show job``.
        nodes: lines NAME|FEATURES of sinfo.
        excluded: compact host lists.
    """
    needed = re.match(r"\d+", _value(job, "NumNodes"))
    features = _value(job, "Features")
    # Only conjunctions are evaluated; with alternatives, counts or brackets every node counts.
    required = set(features.split("&")) if re.fullmatch(r"[\w.&-]+", features) else set()
    hosts = set()
    for line in nodes.splitlines():
        name, _, has = line.strip().partition("|")
        if name and required <= set(has.split(",")):
            hosts.add(name)
    try:
        without = sorted({host for item in excluded for host in expand(item)})
    except HostListError:
        return None
    left = hosts - set(without)
    if needed is None or not hosts or len(left) >= int(needed[0]):
        return None
    place = f"partition {_value(job, 'Partition')}" + (f" with {features}" if required else "")
    return (
        f"without {', '.join(without)}, which failed or are excluded, {place} has {len(left)} of the {needed[0]} nodes "
        "that the job needs, and it would wait forever; repair them and remove RUN/attempts/*/exclude, or take "
        "another --partition or fewer --nodes; then submit again with --resume"
    )


def _value(shown: str, key: str) -> str:
    match = re.search(rf"(?:^|\s){key}=(\S*)", shown)
    return match[1] if match and match[1] != "(null)" else ""
