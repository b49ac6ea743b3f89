"""``rlpost list``: the runs of a folder, as a table of as many columns as fit the terminal, or JSON.

Names of runs and jobs are never truncated: they are arguments of the other commands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from common.units import counted
from rlpost.cli.runs import add_runs_dir, list_runs
from rlpost.cli.terminal import console
from rlpost.config.arguments import Parser, add_switch
from rlpost.errors import ConfigError, suggestion
from rlpost.extensions.watching.run_status import STATE_COLOURS, Status, headline, statuses
from slurm.states import JobState

GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column. Columns of the highest ``rank`` are omitted first; rank 0 is always shown."""

    name: str
    rank: int
    value: Callable[[Status], str]


def _money(cost: float | None) -> str:
    return "" if cost is None else f"{cost:,.2f}"


def _step(status: Status) -> str:
    if not status.step and not (status.num_attempts and status.num_steps):
        return ""
    return f"{status.step}/{status.num_steps}" if status.num_steps else str(status.step)


COLUMNS = (
    Column("run", 0, lambda status: status.name),
    Column("job", 0, lambda status: status.job_id or ""),
    Column("state", 0, lambda status: status.state),
    Column("step", 1, _step),
    Column("verdict", 2, lambda status: status.verdict or ""),
    Column("reward", 3, lambda s: "" if s.reward is None else f"{s.reward:.3f}"),
    Column("goodput", 4, lambda s: s.goodput.headline if s.goodput else ""),
    Column("cost", 5, lambda s: _money(s.goodput.cost) if s.goodput else ""),
    Column("attempts", 6, lambda s: str(s.num_attempts) if s.num_attempts else ""),
    Column("checkpoint", 7, lambda status: status.checkpoint or ""),
)


def table(runs: Sequence[Status], width: int) -> list[list[str]]:
    """Return the rows of the widest table that fits ``width`` columns, padded; names come first.

    A table whose names and states alone are wider is returned whole.
    """
    columns = [one for one in COLUMNS if one.name != "cost" or any(map(one.value, runs))]
    cells = {one.name: [one.name, *map(one.value, runs)] for one in columns}
    widths = {name: max(map(len, texts)) for name, texts in cells.items()}
    while True:
        last = max(columns, key=lambda column: column.rank)
        total = sum(widths[one.name] for one in columns) + GAP * (len(columns) - 1)
        if total <= width or last.rank == 0:
            break
        columns.remove(last)
    padded = []
    for one in columns:
        padded.append([cell.ljust(widths[one.name]) for cell in cells[one.name]])
    return [list(row) for row in zip(*padded, strict=True)]


def total_cost(found: Sequence[Status]) -> list[str]:
    """Return a line with the GPU hours and the cost of all runs; none unless two have a cost.

    >>> total_cost([])
    []
    """
    spent = [one.goodput for one in found if one.goodput is not None]
    costs = [one.cost for one in spent if one.cost is not None]
    if len(costs) < 2:
        return []
    hours = sum(one.gpu_hours for one in spent if one.cost is not None)
    return [f"cost of {counted(len(costs), 'run')}: {_money(sum(costs))} for {hours:,.1f} GPU h"]


def reasons(found: Sequence[Status]) -> list[str]:
    """Return a line ``RUN: why`` for each run with a reason, and one where all have the same."""
    of_run = {status.name: headline(status) for status in found if headline(status)}
    distinct = set(of_run.values())
    if len(distinct) == 1 and len(of_run) > 1:
        return [f"{counted(len(of_run), 'run')}: {distinct.pop()}"]
    return [f"{name}: {why}" for name, why in of_run.items()]


def show_list(found: Sequence[Status]) -> None:
    """Print the table of several runs, and below it the reasons for their states."""
    from rich.text import Text

    out = console()
    header, *lines = table(found, out.width)
    out.print(Text((" " * GAP).join(header).rstrip(), style="bold"), soft_wrap=True)
    for cells in lines:
        line = Text((" " * GAP).join(cells).rstrip())
        for state, style in STATE_COLOURS.items():
            line.highlight_regex(rf"(?<= ){state}\b", style)
        out.print(line, soft_wrap=True)
    below = [*reasons(found), *total_cost(found)]
    for number, why in enumerate(below):
        out.print(Text(why if number else f"\n{why}"), soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    """``rlpost list [--state STATE,...] [--num N] [--json]``."""
    parser = Parser(prog="rlpost list", description="The runs of a folder, the newest first.")
    add_runs_dir(parser)
    parser.add_argument(
        "--num", type=int, default=20, metavar="N", help="how many at most (default: 20)"
    )
    parser.add_argument(
        "--state",
        metavar="STATE[,STATE]",
        help="only runs in these states of Slurm, such as RUNNING,FAILED",
    )
    add_switch(parser, "--json", "print JSON")
    options = parser.parse_args(arguments)
    states = None if options.state is None else _states(options.state)
    listing = list_runs(options.runs_dir)
    runs = listing.runs
    if states is None:
        runs = runs[: options.num]
    shown = [one for one in statuses(runs) if states is None or one.state in states]
    shown = shown[: options.num]
    if options.json:
        print(json.dumps([asdict(status) for status in shown], indent=2))
    else:
        show_list(shown)
    if listing.num_hidden:
        print(f"note: {listing.hidden_words}", file=sys.stderr)
    return 0


def _states(text: str) -> list[str]:
    """The states of ``--state``. Raises ConfigError for an unknown one."""
    states = text.upper().split(",")
    for state in states:
        if state not in JobState.__members__:
            raise ConfigError(
                f"--state {state}: no state of Slurm{suggestion(state, JobState.__members__)}; "
                f"use {', '.join(JobState.__members__)}"
            )
    return states
