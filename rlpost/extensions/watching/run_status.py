"""The status of runs, from their folders and one query to Slurm.

Input: run folders. Output: ``Status`` values, for ``status``, ``list`` and ``watch``. What cannot be
read stays blank: monitoring never fails on an incomplete run.

The status of a run that has ended is cached in its folder, valid while the sizes and times of its
source files are unchanged: a list of 200 ended runs reads 200 small files.
"""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from common.attempt import DRIVER_LOG, LAUNCH_LOG, VERDICT_FILE, VERDICT_JSON
from common.error_lines import error_line, with_remedy
from common.files import read_object, tail_or_empty, text_or_empty, write_atomic
from common.host_lists import HostListError, expand
from common.ledger import Entry
from common.log_format import as_text
from common.run_folder import RunFolder
from common.scrape_targets import empty_targets
from common.units import MAX_NAMED, counted
from rlpost.cli.runs import (
    LOCAL,
    cause_in,
    is_evaluation,
    last,
    local_is_alive,
    newest_job,
    of_ledger,
    settings_of,
    settle,
)
from rlpost.extensions.watching.field_types import check_fields
from rlpost.extensions.watching.goodput import Goodput, end_of, goodput
from rlpost.extensions.watching.gpu_layout import GpuLayout
from rlpost.extensions.watching.pace import PACE_STEPS, STEP_S, mean_phases, recent, throughput
from rlpost.observe.driver_lines import duration, kept_words
from rlpost.observe.writer import eval_rewards, read_metrics
from slurm.causes import HostEnd
from slurm.queue import QueueEntry, queue
from slurm.states import JobState, parse_state
from slurm.submissions import explain, unknown_submissions

MAX_WARNINGS = 4
MAX_HEADLINE = 160  # characters
LOG_TAIL = 1 << 16  # bytes
_WARNING = re.compile(
    r"^(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?:\.\d+)? \S* ?(WARNING|ERROR|CRITICAL)\b"
)
_JOINED = re.compile(r"([\w.-]+) joined from ")
# A line that neither slurm.enroot nor enroot writes before the container runs.
_AFTER_EXTRACTION = re.compile(r"^(?!.*[Ee]xtracting |Parallel unsquashfs|\d+ inodes|\s*$)", re.M)
STATE_COLOURS = {
    "RUNNING": "green",
    "COMPLETED": "green",
    "PENDING": "yellow",
    "FAILED": "red",
    "NODE_FAIL": "red",
}
CACHE = ".status.json"
VERSION = 3
"""Version of the cached format; a status of another version is computed again."""
_OUTCOME_STATES = {
    "done": JobState.COMPLETED,
    "requeue": JobState.CANCELLED,
    None: JobState.UNKNOWN,
}


@dataclass(frozen=True, slots=True)
class Status:
    """One run.

    ``state`` is Slurm's; ``verdict`` that of the newest attempt; None and empty mean not known
    (yet).

    ``verdict`` and ``cause`` are the agents' or, where they left none, the batch host's;
    ``decision`` is the batch host's decision on them. ``phases_s`` are the mean seconds of each
    phase in the newest steps; ``warnings`` the newest of the driver, each once. ``attempt`` is the
    name of the newest attempt's folder; ``reward`` the mean of the last step; ``evals`` the newest
    mean reward of each evaluation set. ``goodput`` is None before the first attempt, and where
    run.json does not give the GPUs. ``kept`` says what the newest driver continued of the groups that
    were in generation, ``changed`` which settings that decide results had other values before.
    """

    name: str
    folder: str
    job_id: str | None
    state: str
    reason: str = ""
    expected_start: str = ""
    nodelist: str = ""
    time_left_s: int | None = None
    attempt: str | None = None
    verdict: str | None = None
    cause: str = ""
    decision: str = ""
    step: int = 0
    num_steps: int | None = None
    reward: float | None = None
    evals: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    step_s: float | None = None
    eta_s: float | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    checkpoint_time: str | None = None
    checkpoint_age_s: float | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    num_attempts: int = 0
    num_preemptions: int = 0
    recoveries: dict[str, int] = field(default_factory=dict)
    kept: str = ""
    changed: list[str] = field(default_factory=list)
    goodput: Goodput | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def evaluation(self) -> str:
        """The newest mean reward of each evaluation set on one line."""
        return ", ".join(f"{name} {value:.3f}" for name, value in self.evals.items())


def status_of(run: RunFolder, job_id: str | None, entry: QueueEntry | None) -> Status:
    """The status of a run; ``entry`` is its job's queue entry."""
    latest = run.attempts / "latest"
    verdict = text_or_empty(latest / VERDICT_FILE) or None
    events = run.ledger.read()
    entry = of_ledger(entry or _local_entry(job_id, verdict, events), events)
    attempt = newest_attempt(run)
    ended = last(events, "verdict")
    if attempt is None or str(ended.get("attempt")) != attempt:
        ended = {}
    committed = last(events, "committed")
    recovered = [str(event.get("role")) for event in events if event.get("event") == "recovered"]
    return Status(
        name=run.root.name,
        folder=str(run.root),
        job_id=job_id,
        state=str(entry.state),
        reason=_unanswered(events) or entry.reason or _startup(run, attempt, entry, events),
        expected_start=entry.expected_start if entry.state is JobState.PENDING else "",
        nodelist=entry.nodelist,
        time_left_s=entry.time_left_s,
        attempt=attempt,
        verdict=verdict or ended.get("verdict"),
        cause=ended.get("cause")
        or cause_in(latest / VERDICT_JSON)
        or _refusal(run, attempt, entry.state),
        decision=str(ended.get("reason", "")),
        checkpoint=committed.get("checkpoint"),
        checkpoint_step=committed.get("step"),
        checkpoint_time=committed.get("time"),
        checkpoint_age_s=seconds_since(committed.get("time")),
        num_attempts=sum(event.get("event") == "started" for event in events),
        num_preemptions=sum(event.get("event") == "preempted" for event in events),
        recoveries=dict(Counter(recovered)),
        kept=_kept(events, attempt),
        changed=list(last(events, "started").get("changed") or ()),
        warnings=warnings_in(tail_or_empty(latest / DRIVER_LOG, LOG_TAIL)),
        **_progress(run, events, entry),
    )


def _unanswered(events: Sequence[Entry]) -> str:
    """That the run may have a job which is not known yet; empty if it has none."""
    return next((explain(one) for one in unknown_submissions(events) if one.is_of_the_run), "")


def _kept(events: Sequence[Entry], attempt: str | None) -> str:
    """Return what the newest driver of an attempt continued; empty if nothing."""
    entry = last(events, "kept")
    return kept_words(entry) if entry and str(entry.get("attempt")) == attempt else ""


def newest_attempt(run: RunFolder) -> str | None:
    """The name of the newest attempt's folder; None before the first."""
    latest = run.attempts / "latest"
    return latest.resolve().name if latest.exists() else None


def _startup(
    run: RunFolder, attempt: str | None, entry: QueueEntry, events: Sequence[Entry]
) -> str:
    """Progress of the newest attempt until its cluster is up; empty if it does not start now."""
    if entry.state is not JobState.RUNNING or attempt is None or last(events, "done"):
        return ""
    folder = run.attempts / attempt
    known = [event for event in events if str(event.get("attempt")) == attempt]
    if not last(known, "attempt"):
        return "starting: importing the image" if (folder / LAUNCH_LOG).exists() else ""
    if last(known, "started") or last(known, "verdict"):
        return ""
    try:
        hosts = expand(str(last(known, "attempt").get("nodes", "")))
    except HostListError:
        return ""
    return startup_line(folder, hosts)


def startup_line(attempt_dir: Path, hosts: Sequence[str]) -> str:
    """``starting: 1 of 2 nodes joined; extracting the image on n02``.

    The head logs each node that joins. Until its container runs, a node's log holds at most what
    enroot says about the extraction.
    """
    if not hosts:
        return ""
    logs = {host: tail_or_empty(attempt_dir / f"agent-{host}.log", LOG_TAIL) for host in hosts[:1]}
    joined = set(_JOINED.findall(logs[hosts[0]])) & set(hosts)
    if HostEnd(words=logs[hosts[0]]).agent_began:
        joined.add(hosts[0])
    line = f"starting: {len(joined)} of {counted(len(hosts), 'node')} joined"
    missing = [host for host in hosts if host not in joined][:MAX_NAMED]
    if text_or_empty(attempt_dir / "container") not in ("pyxis", "enroot"):
        return line
    logs |= {host: tail_or_empty(attempt_dir / f"agent-{host}.log", LOG_TAIL) for host in missing}
    extracting = [host for host in missing if not _AFTER_EXTRACTION.search(logs[host])]
    return f"{line}; extracting the image on {', '.join(extracting)}" if extracting else line


def _refusal(run: RunFolder, attempt: str | None, state: JobState) -> str:
    """Last output line of a batch script that ended before its first attempt (exit code 78)."""
    if attempt is not None or not state.is_over:
        return ""
    logs = sorted(run.root.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
    lines = tail_or_empty(logs[-1], LOG_TAIL).strip().splitlines() if logs else []
    return lines[-1] if lines else ""


def _progress(
    run: RunFolder, events: Sequence[dict[str, object]], entry: QueueEntry
) -> dict[str, Any]:
    lines, settings, is_over = read_metrics(run.metrics), settings_of(run), entry.state.is_over
    total = settings.get("rollout", {}).get("num_rollout")
    newest = end_of(events) if entry.is_over else None
    layout = GpuLayout.of_settings(settings)
    if is_evaluation(settings):  # it trains nothing
        total = layout = None
    spent = goodput(events, lines, layout, newest or datetime.now(UTC))
    if not lines:
        return {"num_steps": total, "goodput": spent}
    step = int(lines[-1]["step"])
    pace = recent(lines, STEP_S)
    evals = {name.split("/")[1]: line[name] for line in lines for name in eval_rewards(line)}
    return {
        "goodput": spent,
        "step": step,
        "num_steps": total,
        "reward": lines[-1].get("reward/mean"),
        "evals": evals,
        "tokens_per_s": throughput(lines),
        "step_s": pace,
        "phases_s": mean_phases(lines[-PACE_STEPS:]),
        "mfu": lines[-1].get("perf/mfu_frac"),
        "eta_s": None if is_over or pace is None or total is None else pace * (total - step),
    }


def headline(status: Status) -> str:
    """The reason for a run's state in one line: Slurm's reason, or the cause of its failure."""
    is_failure = status.verdict in (None, "config", "failed", "none")
    is_waiting = status.state in (JobState.PENDING, JobState.RUNNING, JobState.CONFIGURING)
    line = error_line(status.cause)
    if not is_failure or is_waiting or not line:
        return status.reason
    return line if len(line) <= MAX_HEADLINE else line[: MAX_HEADLINE - 3] + "..."


def ago(seconds: float) -> str:
    """Format the age of something, such as ``0:42 ago``."""
    return f"{duration(max(0.0, seconds))} ago"


def rows(status: Status) -> list[tuple[str, str]]:
    """Return the known facts of a run as (name, value)."""
    of = f"/{status.num_steps}" if status.num_steps else ""
    pace = f", {status.step_s:.2f} s a step" if status.step_s is not None else ""
    pace += f", MFU {status.mfu:.0%}" if status.mfu is not None else ""
    phases = status.phases_s
    why, error = headline(status), error_line(status.cause)
    # the row of the verdict already shows the cause
    is_shown = bool(status.verdict and error.startswith(why.removesuffix("...")))
    shown = [
        ("run", status.name),
        ("folder", status.folder),
        ("job", status.job_id or "never submitted"),
        ("state", status.state),
        ("why", "" if is_shown else why),
        ("expected start", status.expected_start),
        ("nodes", status.nodelist),
        ("time left", "" if status.time_left_s is None else duration(status.time_left_s)),
        ("attempt", status.attempt or ""),
        ("verdict", ": ".join(filter(None, (status.verdict, with_remedy(status.cause))))),
        ("decision", status.decision if status.verdict != "done" else ""),
        (
            "step",
            f"{status.step}{of}" + (f", done in {duration(status.eta_s)}" if status.eta_s else ""),
        ),
        ("reward", "" if status.reward is None else f"{status.reward:.3f}"),
        ("evaluation", status.evaluation),
        (
            "throughput",
            "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f} tokens/s{pace}",
        ),
        (
            "phases",
            ", ".join(
                f"{name} {seconds / sum(phases.values()):.0%}" for name, seconds in phases.items()
            ),
        ),
        (
            "checkpoint",
            f"{status.checkpoint}, {ago(status.checkpoint_age_s or 0.0)}"
            if status.checkpoint
            else "",
        ),
        ("preemptions", str(status.num_preemptions) if status.num_preemptions else ""),
        ("recoveries", ", ".join(f"{role} {n}" for role, n in status.recoveries.items())),
        ("resumed with", status.kept),
        *(("changed", line) for line in status.changed),
        ("goodput", goodput_words(status)),
        ("cost", status.goodput.cost_words if status.goodput else ""),
        *(("warning", line) for line in status.warnings),
    ]
    return [(name, value) for name, value in shown if value]


def goodput_words(status: Status) -> str:
    """The line of the goodput; empty before the first attempt."""
    if status.goodput is not None:
        return status.goodput.line
    return "unknown: run.json does not give the GPUs" if status.num_attempts else ""


def warnings_in(log: str) -> list[str]:
    """The newest distinct warnings of a driver's log."""
    lines = [as_text(line).partition("\n")[0] for line in log.splitlines()]
    found = [line for line in lines if _WARNING.match(line)]
    return list(dict.fromkeys(found))[-MAX_WARNINGS:]


def seconds_since(moment: str | None) -> float | None:
    """Seconds since a timestamp of the ledger; None for None."""
    if moment is None:
        return None
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _local_entry(
    job_id: str | None, verdict: str | None, events: Sequence[Mapping[str, object]]
) -> QueueEntry:
    """The entry of a run on this machine: it ends with its process, also without a verdict.

    Another host cannot see the process, so the state is UNKNOWN there unless there is a verdict.
    """
    if job_id is None or not job_id.startswith(LOCAL):
        return QueueEntry("", JobState.UNKNOWN)
    submitted: Mapping[str, Any] = next(
        (one for one in reversed(events) if one.get("job_id") == job_id and one.get("host")), {}
    )
    host = submitted.get("host")
    is_here = host == socket.gethostname()
    if (is_here or host is None) and local_is_alive(job_id):
        return QueueEntry("", JobState.RUNNING)
    state = _OUTCOME_STATES.get(verdict, JobState.FAILED)
    if state is JobState.UNKNOWN:  # no folder of an attempt, which may have been deleted
        recorded = of_ledger(QueueEntry("", state), events)
        if recorded.state is not JobState.UNKNOWN:
            return recorded
    if state is JobState.UNKNOWN and is_here:
        return QueueEntry("", JobState.FAILED, reason=f"the process of {job_id} was killed")
    if state is JobState.UNKNOWN and host is not None:
        return QueueEntry("", state, reason=f"it runs or ran on {host}; ask there")
    return QueueEntry("", state)


def statuses(runs: Sequence[RunFolder]) -> list[Status]:
    """Return the status of each run; that of a run whose files are damaged says so."""
    kept = {run.root: read_cached(run) for run in runs}
    for run in runs:
        if kept[run.root] is None:
            settle(run)
    ids = {run.root: newest_job(run) for run in runs if kept[run.root] is None}
    entries = queue([job_id for job_id in ids.values() if job_id and not job_id.startswith(LOCAL)])

    def of(run: RunFolder) -> Status:
        if (status := kept[run.root]) is not None:
            return replace(status, checkpoint_age_s=seconds_since(status.checkpoint_time))
        status = status_of(run, ids[run.root], entries.get(ids[run.root] or ""))
        check_fields(Status, asdict(status))
        state = parse_state(status.state)
        if state.is_over and state is not JobState.PREEMPTED:  # a preempted run may restart
            empty_targets(run.root)  # an attempt that was killed left its Prometheus targets
        if state.is_over and not unknown_submissions(run.ledger.read()):
            keep(run, status)
        return status

    return [_or_unreadable(run, partial(of, run)) for run in runs]


def _or_unreadable(run: RunFolder, read: Callable[[], Status]) -> Status:
    """Return a status that can be shown, whatever the files of a run hold."""
    try:
        status = read()
        rows(status)
        return status
    except Exception as error:  # a damaged or hostile folder must not end a table of other runs
        why = str(error).partition("\n")[0][:MAX_HEADLINE]
        reason = f"its files cannot be read: {type(error).__name__}: {why}"
        return Status(run.root.name, str(run.root), None, str(JobState.UNKNOWN), reason=reason)


def sources(run: RunFolder) -> list[list[str | int]]:
    """Return name, size and time of modification of the files that a status is made from."""
    latest = run.attempts / (newest_attempt(run) or "latest")
    paths = [run.run_json, run.ledger.path, run.metrics, latest]
    paths += [latest / name for name in (VERDICT_FILE, VERDICT_JSON, DRIVER_LOG)]
    return [found for path in paths if (found := _stamp(path, run)) is not None]


def read_cached(run: RunFolder) -> Status | None:
    """Return the status that was kept, or None when it is missing, unreadable or out of date."""
    try:
        kept = read_object(run.root / CACHE)
        if kept["version"] != VERSION or kept["sources"] != sources(run):
            return None
        return _from_json(kept["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(run: RunFolder, status: Status) -> None:
    """Keep the status of a run that has ended."""
    kept = {"version": VERSION, "sources": sources(run), "status": asdict(status)}
    with suppress(OSError):
        write_atomic(run.root / CACHE, json.dumps(kept))


def _stamp(path: Path, run: RunFolder) -> list[str | int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [str(path.relative_to(run.root)), found.st_size, found.st_mtime_ns]


def _from_json(values: Mapping[str, object]) -> Status:
    """Make a status from JSON. Raises TypeError when fields are missing or of another type."""
    if values.keys() != {field.name for field in fields(Status)}:
        raise TypeError("a status of another version")
    check_fields(Status, values)
    goodput = values["goodput"]
    if isinstance(goodput, dict):
        values = {**values, "goodput": Goodput(**goodput)}
    return Status(**values)  # type: ignore[arg-type]  # by ``check_fields``
