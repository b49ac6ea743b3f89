"""``rlpost status``: the status of a run, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from common.error_lines import error_line, with_remedy
from rlpost.cli.run_status import STATE_COLOURS, Status, ago, headline, statuses
from rlpost.cli.runs import add_run_options, find_run
from rlpost.config.arguments import Parser, add_switch
from rlpost.observe.pace import duration
from slurm.states import JobState, parse_state

if TYPE_CHECKING:
    from rich.console import Console

EXIT_UNKNOWN = 3
STATUS_HELP = (
    "Where a run stands. Exit code: 0 if it waits, runs or is complete, 1 if it has failed, 3 if its "
    "state is unknown."
)


def rows(status: Status) -> list[tuple[str, str]]:
    """Return the known facts of a run as (name, value)."""
    of = f"/{status.num_steps}" if status.num_steps else ""
    pace = f", {status.step_s:.2f} s a step" if status.step_s is not None else ""
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


def show(status: Status) -> None:
    """Print the table of one run, coloured in a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows(status):
        style = STATE_COLOURS.get(value, "") if name == "state" else ""
        table.add_row(Text(name, style="bold"), Text(value, style=style))
    console().print(table)


def console() -> Console:
    """Return the console; for a pipe it is so wide that no path is wrapped."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 400)


def exit_code(status: Status) -> int:
    """Return 0 for a run that waits, runs or is complete, 1 for a failed one, 3 if unknown."""
    state = parse_state(status.state)
    if state is JobState.UNKNOWN:
        return EXIT_UNKNOWN
    return int(state.is_over and state is not JobState.COMPLETED)


def main(arguments: Sequence[str]) -> int:
    """``rlpost status [RUN] [--json | --watch]``; the exit code is that of ``exit_code``."""
    parser = Parser(prog="rlpost status", description=STATUS_HELP)
    add_run_options(parser)
    how = parser.add_mutually_exclusive_group()
    add_switch(how, "--json", "print JSON")
    add_switch(how, "--watch", "a page in the terminal that follows the run; Ctrl-C leaves")
    options = parser.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    if options.watch:
        from rlpost.cli.watch import watch  # loads more of rich than a table needs

        return watch(run)
    status = statuses([run])[0]
    if options.json:
        print(json.dumps(asdict(status), indent=2))
    else:
        show(status)
    return exit_code(status)
