"""``rlpost status``: the status of a run, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rlpost.cli.runs import add_run_options, find_run
from rlpost.cli.terminal import console
from rlpost.config.arguments import Parser, add_switch
from rlpost.extensions.watching.run_status import STATE_COLOURS, Status, rows, statuses
from slurm.states import JobState, parse_state

EXIT_UNKNOWN = 3
STATUS_HELP = (
    "Where a run stands. Exit code: 0 if it waits, runs or is complete, 1 if it has failed, 3 if its "
    "state is unknown."
)


def show(status: Status) -> None:
    """Print the table of one run, coloured in a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows(status):
        style = STATE_COLOURS.get(value, "") if name == "state" else ""
        table.add_row(Text(name, style="bold"), Text(value, style=style))
    console().print(table)


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
        from rlpost.extensions.watching.watch import watch  # loads more of rich than a table needs

        return watch(run)
    status = statuses([run])[0]
    if options.json:
        print(json.dumps(asdict(status), indent=2))
    else:
        show(status)
    return exit_code(status)
