"""The history of a run over time, from its ledger. Pure.

Input: the ledger's entries and the time of the report. Output: spans of activities, without gaps
from the first entry to the last; marks; one row per attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from common.error_lines import error_line
from common.ledger import Entry
from rlpost.extensions.watching.series import Point, thin
from rlpost.observe.driver_lines import kept_words

Doing = Literal["waiting", "starting", "training", "ending"]
_NEXT: dict[str, Doing] = {
    "submitted": "waiting",
    "attempt": "starting",
    "started": "starting",
    "ready": "training",
    "preempted": "ending",
    "verdict": "waiting",
    "chained": "waiting",
}
COMES_BACK = ("again",)  # answers of slurm.supervise after which the job is requeued


@dataclass(frozen=True, slots=True)
class Span:
    """An activity; times are seconds since the first entry."""

    doing: Doing
    begin_s: float
    end_s: float
    attempt: str | None


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: a commit, a preemption, a failure, a recovery within an attempt or the end."""

    kind: Literal["committed", "preempted", "failed", "recovered", "done"]
    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of the job. None stands for an event that has not happened."""

    name: str
    began: datetime
    nodes: str = ""
    startup_s: float | None = None
    first_step: int | None = None
    last_saved: int | None = None
    lasted_s: float = 0.0
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The history; ``begin`` is the time of the first entry."""

    begin: datetime
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    attempts: tuple[Attempt, ...]

    @property
    def end_s(self) -> float:
        """End of the last span."""
        return self.spans[-1].end_s if self.spans else 0.0

    @property
    def num_preemptions(self) -> int:
        return sum(mark.kind == "preempted" for mark in self.marks)

    def spent_s(self, doing: Doing) -> float:
        """Total time of an activity."""
        return sum(span.end_s - span.begin_s for span in self.spans if span.doing == doing)


def timeline(events: Sequence[Entry], until: datetime) -> Timeline | None:
    """Return the history; None for an empty ledger."""
    entries, until = without_jumps_back(events, until)
    if not entries:
        return None
    begin = entries[0][0]
    spans: list[Span] = []
    doing, since, attempt = None, 0.0, None
    for when, entry in entries:
        at_s, following = (when - begin).total_seconds(), _following(doing, entry)
        if following != doing:
            if doing is not None and at_s > since:
                spans.append(Span(doing, since, at_s, attempt))
            doing, since = following, at_s
        attempt = attempt if entry.get("attempt") is None else str(entry["attempt"])
    now_s = (until - begin).total_seconds()
    if doing is not None and now_s > since:
        spans.append(Span(doing, since, now_s, attempt))
    marks = [
        mark for when, entry in entries if (mark := _mark(entry, (when - begin).total_seconds()))
    ]
    return Timeline(begin, tuple(spans), tuple(marks), _attempts(entries, until))


def _following(doing: Doing | None, entry: Entry) -> Doing | None:
    event = entry["event"]
    over = event == "verdict" and entry.get("answer") not in COMES_BACK
    if event == "done" or over or (doing is None and event in ("verdict", "committed")):
        return None
    return _NEXT.get(event, doing)


def _mark(entry: Mapping[str, object], at_s: float) -> Mark | None:
    match entry["event"]:
        case "committed":
            return Mark("committed", at_s, f"checkpoint at step {entry.get('step')}")
        case "preempted":
            return Mark("preempted", at_s, _preempted(entry))
        case "hang":
            return Mark("failed", at_s, _hang(entry))
        case "engine_lost":
            return Mark("failed", at_s, f"{_engines(entry)} lost: {entry.get('cause', '')}")
        case "recovered":
            return Mark("recovered", at_s, _recovered(entry))
        case "kept":
            return Mark("recovered", at_s, kept_words(entry))
        case "verdict" if entry.get("verdict") not in ("done", "requeue") and not entry.get(
            "correction"
        ):
            return Mark("failed", at_s, _verdict(entry))
        case "done":
            return Mark("done", at_s, f"done at step {entry.get('step')}")
    return None


def _hang(entry: Entry) -> str:
    ranks = entry.get("ranks") or []
    where = f" because of rank {', '.join(map(str, ranks))}" if ranks else ""
    hosts = f" on {', '.join(map(str, entry.get('hosts') or []))}" if entry.get("hosts") else ""
    return f"{entry.get('call')} hangs{where}{hosts}: {entry.get('why', '')}"


def _recovered(entry: Entry) -> str:
    again = entry.get("steps_again")
    steps = f", steps trained again: {again}" if again else ""
    seconds = float(entry.get("seconds", 0.0))
    who = _engines(entry) if entry.get("role") == "engine" else entry.get("role")
    return f"{who} recovered in {seconds:.1f} s{steps}: {entry.get('cause', '')}"


def _engines(entry: Entry) -> str:
    """Return ``engine 1`` or ``engines 1, 2``, with the name of their group (``judge engine 1``)."""
    found = [str(engine) for engine in entry.get("engines") or []]
    group = f"{entry['group']} " if entry.get("group") else ""
    return f"{group}engine{'' if len(found) == 1 else 's'} {', '.join(found)}"


def _verdict(entry: Entry) -> str:
    """The verdict and the line that names the error."""
    return f"{entry.get('verdict')}: {error_line(str(entry.get('cause') or ''))}"


def _preempted(entry: Mapping[str, object]) -> str:
    text = f"preempted: {entry.get('reason', '')}"
    seconds = entry.get("seconds_from_signal")
    if seconds is None:
        return text
    return f"{text} ({entry.get('saved')} safe {seconds:.1f} s after the signal)"


def _attempts(entries: Sequence[tuple[datetime, Entry]], until: datetime) -> tuple[Attempt, ...]:
    attempts: list[Attempt] = []
    is_open = False
    for when, entry in entries:
        event, name = entry["event"], entry.get("attempt")
        if event in ("attempt", "started") and not (is_open and attempts[-1].name == str(name)):
            attempts.append(Attempt(str(name), when))
            is_open = True
        if not attempts:
            continue
        now = attempts[-1]
        match event:
            case "attempt":
                now = replace(now, nodes=str(entry.get("nodes") or ""))
            case "started":
                nodes = entry.get("nodes") or []
                now = replace(now, nodes=", ".join(map(str, nodes)), first_step=entry.get("step"))
            case "ready":
                now = replace(now, startup_s=(when - now.began).total_seconds())
            case "committed":
                now = replace(now, last_saved=entry.get("step"))
            case "preempted":
                now = replace(now, ended=_preempted(entry))
            case "verdict":
                cause = (now.ended or _verdict(entry)).removesuffix("; requeued")
                answer = entry.get("answer")
                now = replace(now, ended=f"{cause}; requeued" if answer in COMES_BACK else cause)
            case "done":
                now = replace(now, ended="done")
        if is_open:
            now = replace(now, lasted_s=(when - now.began).total_seconds())
        if event in ("verdict", "done"):
            is_open = event == "done" and is_open
        attempts[-1] = now
    if attempts and is_open and not attempts[-1].ended:
        attempts[-1] = replace(
            attempts[-1],
            lasted_s=max(attempts[-1].lasted_s, (until - attempts[-1].began).total_seconds()),
        )
    return tuple(attempts)


PAUSES = ("time/eval_s", "checkpoint/blocking_s")
"""Metrics of a line that are no part of its ``time/step_s``."""
MAX_CLOCK_POINTS = 400
HOUR = 3600.0
SKEW_S = 120.0
"""Seconds by which the clocks of two hosts may differ; a larger step back is a clock that was set.
"""


def without_jumps_back(
    events: Sequence[Entry], until: datetime
) -> tuple[list[tuple[datetime, Entry]], datetime]:
    """Return entries and ``until`` with times that never decrease.

    The ledger is in the order of the events. When a clock was set back, no time passes at that
    entry, and later entries keep their distance from it. Entries without a time are left out.
    """
    timed_entries: list[tuple[datetime, Entry]] = []
    behind = timedelta(0)
    for entry in events:
        if "time" not in entry:
            continue
        when = datetime.fromisoformat(entry["time"]) + behind
        newest = timed_entries[-1][0] if timed_entries else when
        if (newest - when).total_seconds() > SKEW_S:
            behind += newest - when
        timed_entries.append((max(when, newest), entry))
    until += behind
    return timed_entries, max(until, timed_entries[-1][0]) if timed_entries else until


def hours_of_steps(events: Sequence[Entry], lines: Sequence[Mapping[str, float]]) -> list[Point]:
    """Return (step, hours since the first entry) in ascending order of both.

    Lines have no time: the end of a step is the moment at which its attempt was ready, plus the
    durations of the attempt's steps up to it, evaluations and checkpoints included. Few points,
    between which a plot interpolates. Empty before the first attempt was ready.
    """
    entries, _ = without_jumps_back(events, datetime.now(UTC))
    if not entries:
        return []
    begin, starts = entries[0][0], []
    for when, entry in entries:
        if entry["event"] == "ready":
            starts.append((int(entry.get("step") or 0), (when - begin).total_seconds()))
    if not starts:
        return []
    # A later attempt replaced the steps after the one that it resumed from.
    points: list[Point] = []
    for number, (first_step, ready_s) in enumerate(starts):
        until = min((step for step, _ in starts[number + 1 :]), default=float("inf"))
        hour = [line for line in lines if first_step < line["step"] <= until]
        if number == 0:
            hour = [line for line in lines if line["step"] <= first_step] + hour
        clock_s = max(ready_s, points[-1][1] * HOUR if points else 0.0)
        for line in hour:
            clock_s += sum(line.get(name, 0.0) for name in ("time/step_s", *PAUSES))
            points.append((float(line["step"]), clock_s / HOUR))
    return thin(points, MAX_CLOCK_POINTS)
