"""``rlpost status --watch``: the table of ``rlpost status`` as a live page, with curves and attempts.

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

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.run_folder import RunFolder
from rlpost.cli.runs import LOCAL, newest_job
from rlpost.cli.terminal import console
from rlpost.errors import ConfigError
from rlpost.extensions.watching.run_status import STATE_COLOURS, Status, ago, rows, status_of
from rlpost.extensions.watching.series import not_finite, points, short
from rlpost.extensions.watching.timeline import Timeline, timeline
from rlpost.observe.driver_lines import duration
from rlpost.observe.writer import read_metrics
from slurm.client import POLL_S
from slurm.queue import FORGOTTEN, QueueEntry, queue
from slurm.states import JobState

REFRESH_S = 5.0
MAX_ATTEMPTS = 6
_BLOCKS = "▁▂▃▄▅▆▇█"
_APART = ("run", "folder", "state", "reward", "warning")
"""Rows of ``rlpost status`` that the page has elsewhere or lacks."""


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
    screen, asked_at, entry = console(), -POLL_S, None
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                job_id = newest_job(run)
                is_due = time.monotonic() - asked_at >= POLL_S
                if job_id and not job_id.startswith(LOCAL) and is_due:
                    asked_at, entry = time.monotonic(), queue([job_id])[job_id]
                view = read_view(run, job_id, entry)
                live.update(page(view, screen.width), refresh=True)
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
    for name, value in rows(status):
        if name not in _APART:
            table.add_row(name, Text(value))
    for name, metric in (("reward", "reward/mean"), ("length", "rollout/response_length_mean")):
        if (curve := _curve(view.lines, metric, max(20, width - 24))) is not None:
            table.add_row(name, curve)
    if view.engines:
        ages = ", ".join(f"{name} {ago(age)}" for name, age in view.engines.items())
        table.add_row("engines", Text(ages))
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
