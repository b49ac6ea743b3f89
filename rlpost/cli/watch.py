"""``rlpost status --watch``: live status of a run in the terminal.

Input: the run folder, read every REFRESH_S, and the job's state, queried from Slurm every POLL_S.
Output: a page rendered from a ``View`` by a pure function; it stays on screen when the run is over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.error_lines import error_line
from common.run_folder import RunFolder
from rlpost.cli.run_status import STATE_COLOURS, Status, ago, status_of
from rlpost.cli.runs import LOCAL, newest_job
from rlpost.errors import ConfigError
from rlpost.observe.pace import PACE_STEPS, duration
from rlpost.observe.report.panels import PHASES, mean_phases
from rlpost.observe.report.series import not_finite, points, short
from rlpost.observe.report.timeline import Timeline, timeline
from rlpost.observe.writer import read_metrics
from slurm.client import POLL_S
from slurm.queue import FORGOTTEN, QueueEntry, queue
from slurm.states import JobState

REFRESH_S = 5.0
MAX_ATTEMPTS = 6
_BLOCKS = "▁▂▃▄▅▆▇█"
_PHASE_COLOURS = ("blue", "dark_orange", "cyan", "magenta")


@dataclass(frozen=True, slots=True)
class View:
    """The content of the page.

    ``engines`` maps each engine's name to the seconds since it last wrote to its log.
    """

    status: Status
    now: datetime
    history: Timeline | None = None
    lines: Sequence[Mapping[str, float]] = ()
    engines: Mapping[str, float] | None = None


def read_view(run: RunFolder, job_id: str | None, entry: QueueEntry | None) -> View:
    """Read the current state from the run folder; ``entry`` is the job's entry in Slurm's queue."""
    now = datetime.now(UTC)
    latest = run.attempts / "latest"
    events = [event for event in run.ledger.read() if "time" in event and "event" in event]
    logs = sorted(latest.glob("engine-*-server.log"))
    status = status_of(run, job_id, entry)
    return View(
        status=status,
        now=now,
        history=timeline(events, now),
        lines=read_metrics(run.metrics),
        engines={
            log.name.removesuffix("-server.log"): max(0.0, time.time() - log.stat().st_mtime)
            for log in logs
        },
    )


def is_over(view: View) -> bool:
    """Return whether the run has ended and is not restarted automatically."""
    done = view.history is not None and any(mark.kind == "done" for mark in view.history.marks[-1:])
    return done or JobState(view.status.state).is_over or view.status.reason == FORGOTTEN


def watch(run: RunFolder) -> int:
    """Show the page until the run is over or Ctrl-C; return 0.

    Raises ConfigError without a terminal.
    """
    if not sys.stdout.isatty():
        raise ConfigError(
            "rlpost status --watch needs a terminal; rlpost status --json is for programs"
        )
    console, asked_at, entry = Console(), -POLL_S, None
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                job_id = newest_job(run)
                is_due = time.monotonic() - asked_at >= POLL_S
                if job_id and not job_id.startswith(LOCAL) and is_due:
                    asked_at, entry = time.monotonic(), queue([job_id])[job_id]
                view = read_view(run, job_id, entry)
                live.update(page(view, console.width), refresh=True)
                if is_over(view):
                    return 0
                time.sleep(REFRESH_S)
        except KeyboardInterrupt:
            return 0


# -- rendering: pure -------------------------------------------------------------------------------


def page(view: View, width: int = 100) -> RenderableType:
    """Render the page for a terminal of ``width`` characters."""
    status = view.status
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(view, max(20, width - 24)):
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    if view.history is not None and view.history.attempts:
        parts += [Text(), _attempts(view.history)]
    if status.warnings:
        parts.append(Text())
        for line in status.warnings:
            parts.append(Text(line, style="yellow", overflow="ellipsis", no_wrap=True))
    title = Text.assemble(
        (status.name, "bold"), "  ", (status.state, STATE_COLOURS.get(status.state, ""))
    )
    subtitle = f"{view.now:%H:%M:%S} UTC, Ctrl-C leaves; the run continues"
    return Panel(
        Group(*parts),
        title=title,
        subtitle=Text(subtitle, style="dim"),
        title_align="left",
        width=width,
    )


def _rows(view: View, room: int) -> list[tuple[str, RenderableType]]:
    status, lines = view.status, view.lines
    rows: list[tuple[str, RenderableType]] = [("job", Text(_job(status)))]
    rows.append(("step", _steps(status, min(room, 40))))
    for name, metric in (("reward", "reward/mean"), ("length", "rollout/response_length_mean")):
        if (curve := _curve(lines, metric, room)) is not None:
            rows.append((name, curve))
    if status.evals:
        rows.append(("evaluation", Text(status.evaluation)))
    if status.tokens_per_s is not None:
        pace = "" if status.step_s is None else f", {status.step_s:.2f} s per step"
        mfu = "" if status.mfu is None else f", MFU {status.mfu:.0%}"
        rows.append(("throughput", Text(f"{status.tokens_per_s:,.0f} tokens/s{pace}{mfu}")))
    if phases := mean_phases(lines[-PACE_STEPS:]):
        rows.append(("phases", phase_bar(phases, min(room, 60))))
    if status.goodput is not None:
        rows.append(("goodput", Text(status.goodput.line)))
    if view.engines:
        ages = ", ".join(f"{name} {ago(age)}" for name, age in view.engines.items())
        rows.append(("engines", Text(ages)))
    rows.append(("checkpoint", _checkpoint(view)))
    if status.verdict:
        rows.append(("verdict", Text(f"{status.verdict}: {error_line(status.cause)}")))
    return rows


def _job(status: Status) -> str:
    left = "" if status.time_left_s is None else f"{duration(status.time_left_s)} left"
    start = f"expected start {status.expected_start}" if status.expected_start else ""
    words = [status.job_id or "never submitted", status.nodelist, left, status.reason, start]
    return ", ".join(word for word in words if word)


def _steps(status: Status, room: int) -> Text:
    if not status.num_steps:
        return Text(str(status.step))
    filled = round(room * min(1.0, status.step / status.num_steps))
    eta = f", done in {duration(status.eta_s)}" if status.eta_s else ""
    bar = [("━" * filled, "green"), ("━" * (room - filled), "dim")]
    return Text.assemble(*bar, f"  {status.step}/{status.num_steps}{eta}")


def _checkpoint(view: View) -> Text:
    status = view.status
    if status.checkpoint is None or status.checkpoint_time is None:
        return Text("none yet", style="dim")
    age = (view.now - datetime.fromisoformat(status.checkpoint_time)).total_seconds()
    return Text(f"{status.checkpoint}, {ago(age)}")


def _attempts(history: Timeline) -> Table:
    headings = ("attempt", "nodes", "ready after", "from", "saved", "lasted", "end")
    table = Table(*headings, box=None, header_style="dim")
    for one in history.attempts[-MAX_ATTEMPTS:]:
        ready = "" if one.startup_s is None else duration(one.startup_s)
        steps = ["" if step is None else str(step) for step in (one.first_step, one.last_saved)]
        end = Text(one.ended or "under way", style="" if one.ended else "green")
        cells = (one.name, one.nodes, ready, *steps, duration(one.lasted_s))
        table.add_row(*map(Text, cells), end)
    return table


def _curve(lines: Sequence[Mapping[str, float]], metric: str, room: int) -> Text | None:
    """The curve of a metric, its newest value, and how many values are not finite."""
    values = [value for _, value in points(lines, metric)]
    lost = not_finite(lines, metric)
    if not values and not lost:
        return None
    shown = f"  {short(values[-1])}" if values else "  no finite value"
    if lost:
        step, word = lost[-1]
        shown += f"; {len(lost)} not finite, the last {word} at step {step:.0f}"
    width = min(room - max(12, len(shown)), 60)
    style = "green" if metric == "reward/mean" else "cyan"
    return Text.assemble((sparkline(values, width) if values else "", style), shown)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most ``width`` characters, each the mean of consecutive values.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    count = min(len(values), max(1, width))
    means = [
        fmean(values[n * len(values) // count : (n + 1) * len(values) // count])
        for n in range(count)
    ]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[3] * count
    return "".join(
        _BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in means
    )


def phase_bar(phases: Mapping[str, float], width: int) -> Text:
    """Return the time of each phase of a step as a bar with a legend."""
    whole = sum(phases.values())
    colours = dict(zip((label for label, _ in PHASES), _PHASE_COLOURS, strict=True))
    bar = [("█" * max(1, round(width * s / whole)), colours[label]) for label, s in phases.items()]
    words: list[str | tuple[str, str]] = []
    for label, seconds in phases.items():
        words += [("  ■ ", colours[label]), f"{label} {seconds / whole:.0%}"]
    return Text.assemble(*bar, "\n", *words)
