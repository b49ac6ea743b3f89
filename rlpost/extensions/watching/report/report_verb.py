"""``rlpost report``: write a run's report as HTML and text.

It can be written while the run is active, also before its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from common.error_lines import error_line
from common.files import write_atomic
from common.ledger import Entry
from common.run_folder import RunFolder
from rlpost.cli.outcome import summary
from rlpost.cli.runs import add_run_options, find_run
from rlpost.config.arguments import Parser
from rlpost.extensions.watching.report.write import write_report
from rlpost.extensions.watching.run_status import rows, statuses


def main(arguments: Sequence[str]) -> int:
    """Write report.html and report.txt; print the text."""
    made = Parser(prog="rlpost report", description="Write the report of a run as HTML and text.")
    add_run_options(made)
    options = made.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    write_report(run)
    text = "\n".join(report_lines(run)) + "\n"
    write_atomic(run.report / "report.txt", text)
    print(text, end="")
    return 0


def report_lines(run: RunFolder) -> list[str]:
    """Return the lines of the report: status, results and events of the run."""
    lines = [f"{name:<12}{value}" for name, value in rows(statuses([run])[0])]
    return [*lines, "", *summary(run), "", *map(_event_line, run.ledger.read())]


def _event_line(entry: Entry) -> str:
    when = datetime.fromisoformat(entry["time"]).strftime("%Y-%m-%d %H:%M:%S")
    shown = {key: value for key, value in entry.items() if key not in ("time", "event")}
    if shown.get("cause"):
        shown["cause"] = error_line(str(shown["cause"]))
    rest = ", ".join(f"{key} {value}" for key, value in shown.items())
    return f"{when}  {entry['event']}  {rest}"
