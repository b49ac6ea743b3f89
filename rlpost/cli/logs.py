"""``rlpost logs [-f] [--node HOST] [--attempt K] [RUN]``: what the driver, or the agent of a node, says."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlpost.cli.follow import follow
from rlpost.cli.runs import add_run_options, current_job, find_run
from rlpost.errors import ConfigError
from slurm.run_folder import RunFolder

DRIVER_LOG = "driver.log"


def main(arguments: Sequence[str]) -> int:
    """Print a log; with -f, go on until the run is over and leave with its result."""
    made = argparse.ArgumentParser(prog="rlpost logs", description="The log of a run.")
    add_run_options(made)
    made.add_argument("-f", "--follow", action="store_true", help="go on, over all attempts, until the run is over")
    made.add_argument("--node", metavar="HOST", help="the log of that node's agent instead of the driver's")
    made.add_argument("--attempt", metavar="K", default="latest", help="which start of the job (default: the latest)")
    options = made.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    name = DRIVER_LOG if options.node is None else f"agent-{options.node}.log"
    if options.follow:
        return follow(run, current_job(run), log_name=name)
    log = run.attempts / options.attempt / name
    if not log.is_file():
        raise ConfigError(_what_there_is(run, log))
    with log.open(errors="replace") as file:
        for line in file:
            print(line, end="")
    return 0


def _what_there_is(run: RunFolder, log: Path) -> str:
    if not log.parent.is_dir():
        attempts = sorted((path.name for path in run.attempts.glob("[0-9]*")), key=lambda name: (len(name), name))
        there = f"there are {', '.join(attempts)}" if attempts else "the job has not started yet; see rlpost status"
        return f"{log.parent}: no such attempt; {there}"
    names = sorted(path.name for path in log.parent.glob("*.log"))
    return f"{log}: not written; there are {', '.join(names) or 'no logs yet'}"
