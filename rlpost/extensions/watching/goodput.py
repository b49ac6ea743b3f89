"""Goodput: the share of the allocated GPU time that produced trained steps. Pure.

The rest of the time is attributed to its uses.

Input: the ledger's entries, the lines of ``metrics.jsonl``, the GPUs of the run. Output:
``Goodput``, one value for ``status``, ``list``, ``report`` and ``compare``; docs/seeing.md defines
its terms.

An attempt's GPUs are allocated from its start on the batch host to its verdict. The ledger gives
the start-up; the metrics give each trained step, the pauses for evaluation and checkpoints;
``started`` gives the steps of earlier attempts that have to be trained again; ``kept`` the tokens
of answers in generation that the next driver continues, which count as trained; ``recovered`` the
seconds in which trainer ranks were started again within an attempt. What remains belongs to the end
of an attempt that did not finish the run (``recovery``), or lies between two steps (``other``).
Every second of an attempt has one use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from common.fleet_name import POLICY
from common.ledger import Entry
from common.units import duration_text
from rlpost.extensions.watching.gpu_layout import GpuLayout
from rlpost.extensions.watching.joined_use import JoinedUse, joined_use
from rlpost.extensions.watching.pace import finite, is_timed
from rlpost.extensions.watching.timeline import COMES_BACK, without_jumps_back

Use = Literal[
    "trained",
    "waiting",
    "updating",
    "repeated",
    "start-up",
    "recovery",
    "saving",
    "evaluation",
    "unassigned",
    "other",
    "not serving",
]
USES: tuple[Use, ...] = get_args(Use)
SHOWN_FROM = 0.005  # least share of the allocated time that the line names
HOUR = 3600.0
BUSY = re.compile("engines/[^/]+/busy_frac")


@dataclass(frozen=True, slots=True)
class Goodput:
    """GPU hours by use. ``queue_s`` is wall time in which the run waited and had no GPUs.

    ``cost`` is in the unit of ``gpu_hour_price``; both are None without a price. The hours of
    engines in other jobs (``fleet_gpu_hours``) are part of ``gpu_hours``.
    """

    trained_frac: float
    gpu_hours: float
    gpu_hours_by_use: dict[str, float]
    queue_s: float
    gpu_hour_price: float | None = None
    cost: float | None = None
    fleet_gpu_hours: float = 0.0
    fleet_served_gpu_hours: float = 0.0

    @property
    def headline(self) -> str:
        """The share and the total, for a column.

        >>> Goodput(0.75, 8.0, {"trained": 6.0, "start-up": 2.0}, 90.0).headline
        '75% of 8.0 GPU h'
        """
        return f"{self.trained_frac:.0%} of {_hours(self.gpu_hours)}"

    @property
    def cost_words(self) -> str:
        """GPU hours and their cost; empty without a price.

        >>> Goodput(0.75, 8.0, {"trained": 6.0, "start-up": 2.0}, 90.0, 2.5, 20.0).cost_words
        '20.00 for 8.0 GPU h at 2.50, 15.00 of it trained steps'
        """
        if self.cost is None:
            return ""
        trained = self.cost * self.trained_frac
        return (
            f"{self.cost:,.2f} for {_hours(self.gpu_hours)} at {self.gpu_hour_price:,.2f}, "
            f"{trained:,.2f} of it trained steps"
        )

    @property
    def line(self) -> str:
        """Everything on one line; uses below SHOWN_FROM are left out.

        >>> print(Goodput(0.5, 8.0, {"trained": 4.0, "saving": 4.0}, 90.0, 2.5, 20.0).line)
        50% of 8.0 GPU h trained steps; saving 50% (4.0 GPU h); cost 20.00, trained 10.00; queue 1 min 30 s
        """
        lost = {use: hours for use, hours in self.gpu_hours_by_use.items() if use != "trained"}
        largest_first = sorted(lost.items(), key=lambda item: -item[1])
        shares = [
            f"{use} {hours / self.gpu_hours:.0%} ({_hours(hours)})"
            for use, hours in largest_first
            if hours >= SHOWN_FROM * self.gpu_hours
        ]
        parts = [f"{self.headline} trained steps", *([", ".join(shares)] if shares else [])]
        if self.cost is not None:
            parts.append(f"cost {self.cost:.2f}, trained {self.cost * self.trained_frac:.2f}")
        if self.fleet_gpu_hours:
            share = self.fleet_served_gpu_hours / self.fleet_gpu_hours
            parts.append(f"fleet {_hours(self.fleet_gpu_hours)}, {share:.0%} serving")
        if self.queue_s >= 1:
            parts.append(f"queue {duration_text(round(self.queue_s))}")
        return "; ".join(parts)


def goodput(
    events: Sequence[Entry],
    lines: Sequence[Mapping[str, float]],
    layout: GpuLayout | None,
    until: datetime,
) -> Goodput | None:
    """Return the goodput of a run up to ``until``.

    None before its first attempt, and without a layout.

    Args: until: the end of what is still running. For a job that is known to be over, the time of
        its last entry.
    """
    entries, until = without_jumps_back(events, until)
    attempts = _attempts(entries, until)
    if layout is None or not attempts:
        return None
    # The order matters: each call takes from the time that those before it left without a use.
    _add_steps(attempts, lines)
    _add_recoveries(attempts)
    _add_kept(attempts, _tokens_per_s(lines))
    _add_repeated(attempts)
    hours: dict[str, float] = dict.fromkeys(USES, 0.0)
    for attempt in attempts:
        for use, gpu_seconds in _gpu_seconds(attempt, layout).items():
            hours[use] += gpu_seconds / HOUR
    joined = joined_use(events)
    for group, group_lines in joined.items():
        _add_joined(hours, group, group_lines, attempts, layout)
    total = sum(hours.values())
    if total <= 0:
        return None
    price = layout.gpu_hour_price
    return Goodput(
        trained_frac=hours["trained"] / total,
        gpu_hours=total,
        gpu_hours_by_use={use: spent for use, spent in hours.items() if spent},
        queue_s=_queue_s(entries, attempts, until),
        gpu_hour_price=price,
        cost=None if price is None else price * total,
        fleet_gpu_hours=sum(use.allocated_gpu_s for use in joined.values()) / HOUR,
        fleet_served_gpu_hours=sum(use.served_gpu_s for use in joined.values()) / HOUR,
    )


def end_of(events: Sequence[Entry]) -> datetime | None:
    """The time of the last entry, for a job that is over without a verdict."""
    times = [datetime.fromisoformat(entry["time"]) for entry in events if "time" in entry]
    return times[-1] if times else None


# -- attempts from the ledger --


@dataclass(slots=True)
class _Step:
    """A trained step: its number, its seconds, and those in which trainer and engines were idle.

    ``update_s``: seconds in which a weight update stalled the engines; in synchronous runs they are
    idle then. ``busy``: share of it in which the engines of each group worked.
    """

    number: float
    seconds: float
    trainer_idle_s: float
    engines_idle_s: float
    update_s: float = 0.0
    busy: Mapping[str, float] = field(default_factory=dict)

    def shorten(self, recovery_s: float) -> float:
        """Take out the seconds of a recovery, without work of the trainer; return how many."""
        taken = min(recovery_s, self.seconds)
        self.seconds -= taken
        self.trainer_idle_s = min(self.trainer_idle_s, self.seconds)
        self.engines_idle_s = max(0.0, min(self.engines_idle_s - taken, self.seconds))
        self.update_s = min(self.update_s, self.seconds)
        return taken


@dataclass(slots=True)
class _Attempt:
    """Facts about an attempt from the ledger and the metrics; times are seconds."""

    began: datetime
    ended: datetime
    num_nodes: int | None = None
    startup_s: float | None = None  # None: never ready
    first_step: int | None = None
    gpus: Mapping[str, Any] = field(default_factory=dict)
    steps_again_s: float = 0.0  # of steps of earlier attempts that it trains again
    recoveries: list[Entry] = field(default_factory=list)  # of the trainer, within the attempt
    kept: list[Entry] = field(default_factory=list)  # what its drivers continued
    comes_back: bool = False
    finished: bool = False  # done, or still running
    steps: list[_Step] = field(default_factory=list)
    evaluation_s: float = 0.0
    saving_s: float = 0.0
    repeated_s: float = 0.0
    recovered_s: float = 0.0

    @property
    def running_s(self) -> float:
        """Seconds after the start-up."""
        if self.startup_s is None:
            return 0.0
        return max(0.0, (self.ended - self.began).total_seconds() - self.startup_s)

    @property
    def rest_s(self) -> float:
        """Seconds after the start-up that have no other use."""
        explained = sum(step.seconds for step in self.steps) + self.recovered_s
        explained += self.evaluation_s + self.saving_s + self.repeated_s
        return max(0.0, self.running_s - explained)


def _attempts(entries: Sequence[tuple[datetime, Entry]], until: datetime) -> list[_Attempt]:
    attempts: list[_Attempt] = []
    name, is_open, is_over = None, False, False
    for when, entry in entries:
        event = entry.get("event")
        if event == "attempt" or (
            event == "started" and not (is_open and name == str(entry.get("attempt")))
        ):
            attempts.append(_Attempt(when, when))
            name, is_open, is_over = str(entry.get("attempt")), True, False
        if attempts and event == "verdict" and entry.get("correction"):
            attempts[-1].comes_back = entry.get("answer") in COMES_BACK
        if not attempts or event == "submitted" or not is_open:
            continue
        now = attempts[-1]
        now.ended = when
        _record(now, event, entry, when)
        is_over = is_over or event in ("done", "preempted", "cancelled")
        is_open = event != "verdict"
    if attempts and is_open and not is_over:
        now = attempts[-1]
        now.ended, now.finished = max(now.ended, until), True
    return attempts


def _record(attempt: _Attempt, event: object, entry: Entry, when: datetime) -> None:
    """Record a ledger entry in its attempt."""
    match event:
        case "attempt":
            attempt.num_nodes = entry.get("num_nodes")
        case "started":
            attempt.first_step, attempt.gpus = entry.get("step"), entry.get("gpus") or {}
            attempt.steps_again_s = float((entry.get("again") or {}).get("step_s", 0.0))
        case "ready":
            attempt.startup_s = (when - attempt.began).total_seconds()
        case "committed":
            attempt.saving_s += entry.get("blocking_s") or 0.0
        case "recovered":
            attempt.recoveries.append(entry)
        case "kept":
            attempt.kept.append(entry)
        case "done":
            attempt.finished = True
        case "verdict":
            attempt.comes_back = entry.get("answer") in COMES_BACK


# -- seconds of each use --


def _attempt_of(starts: Sequence[_Attempt], line: Mapping[str, float]) -> _Attempt | None:
    """The newest attempt that started before the line's step: later ones replaced earlier ones'."""
    return next((one for one in reversed(starts) if (one.first_step or 0) < line["step"]), None)


def _add_steps(attempts: Sequence[_Attempt], lines: Sequence[Mapping[str, float]]) -> None:
    """Assign each metrics line to its attempt."""
    starts = [attempt for attempt in attempts if attempt.startup_s is not None]
    for line in lines:
        owner = _attempt_of(starts, line)
        if owner is None:
            owner = starts[0] if starts else None  # the evaluation before the first step
        if owner is None:
            continue
        owner.evaluation_s += finite(line, "time/eval_s")
        if is_timed(line):
            seconds = line["time/step_s"]
            waits = finite(line, "time/trainer_waits_frac")
            engines_wait = max(0.0, 1.0 - finite(line, "time/generation_waited_frac", 1.0))
            # the update before the first step is not part of its time
            update_s = min(finite(line, "sync/update_s"), finite(line, "time/sync_s"), seconds)
            idle = waits * seconds, engines_wait * seconds
            owner.steps.append(_Step(line["step"], seconds, *idle, update_s, _busy(line)))


def _busy(line: Mapping[str, float]) -> dict[str, float]:
    """Return ``engines/GROUP/busy_frac`` by group."""
    return {key.split("/")[1]: finite(line, key) for key in line if BUSY.fullmatch(key)}


def _add_recoveries(attempts: Sequence[_Attempt]) -> None:
    """Take recoveries out of the steps that they interrupted, or out of the time between steps.

    A metrics line counts these seconds as training or weight update. A recovery during generation,
    or of an engine during a weight update, is already counted as waiting.
    """
    for attempt in attempts:
        for entry in attempt.recoveries:
            phase, seconds = entry.get("phase"), float(entry.get("seconds", 0.0))
            if phase == "generate" or entry.get("role") == "engine":
                continue
            line = entry.get("step", 0) + (phase == "train")
            interrupted = [step for step in attempt.steps if step.number == line]
            taken = 0.0
            if interrupted and phase in ("train", "sync"):
                taken = interrupted[0].shorten(seconds)
            attempt.recovered_s += taken
            attempt.recovered_s += min(seconds - taken, attempt.rest_s)


def _tokens_per_s(lines: Sequence[Mapping[str, float]]) -> float:
    """Return the tokens generated per second of generation in the newest step; 0 if unknown."""
    for line in reversed(lines):
        tokens = finite(line, "time/tokens_per_s") * finite(line, "time/step_s")
        if tokens > 0 and finite(line, "time/generate_s") > 0:
            return tokens / line["time/generate_s"]
    return 0.0


def _add_kept(attempts: Sequence[_Attempt], tokens_per_s: float) -> None:
    """Count the generation of kept tokens as part of a step of the driver that died."""
    for number, attempt in enumerate(attempts):
        for entry in attempt.kept:
            died = attempt if entry.get("incarnation") else attempts[max(0, number - 1)]
            tokens = float(entry.get("tokens", 0))
            seconds = min(tokens / tokens_per_s if tokens_per_s else 0.0, died.rest_s)
            died.steps.append(_Step(-1.0, seconds, seconds, 0.0))


def _add_repeated(attempts: Sequence[_Attempt]) -> None:
    """Charge steps that an attempt trains again to the attempts before it, the newest first."""
    for number, attempt in enumerate(attempts):
        for entry in attempt.recoveries:  # a later driver repeats steps of its attempt
            again_s = float((entry.get("again") or {}).get("step_s", 0.0))
            attempt.repeated_s += min(again_s, attempt.rest_s)
        again_s = attempt.steps_again_s
        for earlier in reversed(attempts[:number]):
            charged = min(again_s, earlier.rest_s)
            earlier.repeated_s += charged
            again_s -= charged


def _gpu_seconds(attempt: _Attempt, layout: GpuLayout) -> dict[Use, float]:
    """GPU seconds by use. During a step the GPUs have roles; else all of them do the same."""
    a_node = attempt.gpus.get("per_node", layout.gpus_per_node)
    trainer = attempt.gpus.get("trainer", layout.trainer)
    engines = attempt.gpus.get("engines", layout.engines)
    groups = attempt.gpus.get("groups", layout.groups)
    gpus = a_node * (attempt.num_nodes or layout.num_nodes)
    lasted_s = (attempt.ended - attempt.began).total_seconds()
    startup_s = lasted_s if attempt.startup_s is None else attempt.startup_s
    rest: Use = "other" if attempt.finished else "recovery"
    spent: dict[Use, float] = dict.fromkeys(USES, 0.0)
    spent["start-up"] = gpus * startup_s
    spent["repeated"] = gpus * attempt.repeated_s
    spent["saving"] = gpus * attempt.saving_s
    spent["evaluation"] = gpus * attempt.evaluation_s
    spent[rest] += gpus * attempt.rest_s
    # engines that need not wait for the trainer generate during its recovery
    generating = 0 if layout.is_colocated or layout.is_synchronous else engines
    spent["recovery"] += (gpus - generating) * attempt.recovered_s
    spent["trained"] += generating * attempt.recovered_s
    for step in attempt.steps:
        waiting, gpus_left, updating = 0.0, gpus, engines * step.update_s
        if not layout.is_colocated:
            waiting = trainer * step.trainer_idle_s
            if layout.is_synchronous:
                updating = engines * min(step.update_s, step.engines_idle_s)
                waiting += engines * step.engines_idle_s - updating
        with_role = trainer if layout.is_colocated else trainer + engines
        for name, busy in step.busy.items():
            num_gpus = groups.get(name, 0)
            spent[layout.use_of(name)] += num_gpus * busy * step.seconds
            spent["waiting"] += num_gpus * (1.0 - busy) * step.seconds
            gpus_left -= num_gpus
        spent["waiting"] += waiting
        spent["updating"] += updating
        spent["trained"] += min(gpus_left, with_role) * step.seconds - waiting - updating
        spent["unassigned"] += max(0, gpus_left - with_role) * step.seconds
    return spent


def _add_joined(
    hours: dict[str, float],
    group: str,
    use: JoinedUse,
    attempts: Sequence[_Attempt],
    layout: GpuLayout,
) -> None:
    """Add the GPU hours of engines in other jobs, which idle as the engines of the run's job do."""
    steps = [step for attempt in attempts for step in attempt.steps]
    stepped_s = sum(step.seconds for step in steps)
    idle_s = 0.0
    if group != POLICY:
        idle_s = sum((1.0 - step.busy.get(group, 0.0)) * step.seconds for step in steps)
    elif layout.is_synchronous:
        idle_s = sum(step.engines_idle_s for step in steps)
    idle = idle_s / stepped_s if stepped_s else 0.0
    served = use.served_gpu_s / HOUR
    hours[layout.use_of(group)] += served * (1.0 - idle)
    hours["waiting"] += served * idle
    hours["not serving"] += use.allocated_gpu_s / HOUR - served


def _queue_s(
    entries: Sequence[tuple[datetime, Entry]], attempts: Sequence[_Attempt], until: datetime
) -> float:
    """Wall time from a submission, or from the end of a requeued attempt, to the next one."""
    submitted = [when for when, entry in entries if entry.get("event") == "submitted"]
    cancelled = [when for when, entry in entries if entry.get("event") == "cancelled"]
    total, ended = 0.0, None
    for attempt in attempts:
        since = max((when for when in submitted if when <= attempt.began), default=None)
        if ended is not None and (since is None or since < ended):
            since = ended  # requeued
        if since is not None:
            total += (attempt.began - since).total_seconds()
        ended = attempt.ended
    newest = attempts[-1]
    since = max((when for when in submitted if when >= newest.ended), default=None)
    if since is None and newest.comes_back:
        since = newest.ended
    if since is None:
        return total
    until = min((when for when in cancelled if when >= since), default=until)
    return total + max(0.0, (until - since).total_seconds())


def _hours(gpu_hours: float) -> str:
    """Format GPU hours.

    >>> _hours(0.0312), _hours(8), _hours(51234.5)
    ('0.031 GPU h', '8.0 GPU h', '51,234 GPU h')
    """
    if gpu_hours < 1:
        return f"{gpu_hours:.2g} GPU h"
    return f"{gpu_hours:.1f} GPU h" if gpu_hours < 100 else f"{gpu_hours:,.0f} GPU h"
