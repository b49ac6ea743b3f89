"""``rlpost logs [RUN]``: print or follow the logs of the driver, agents, actors or engines."""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from io import TextIOWrapper
from itertools import islice
from pathlib import Path

from common.attempt import DRIVER_LOG, VERDICT_JSON
from common.files import open_regular
from common.run_folder import RunFolder
from rlpost.cli.runs import add_run_options, cause_in, current_job, find_run
from rlpost.config.arguments import Parser
from rlpost.errors import ConfigError
from rlpost.extensions.watching.follow import follow
from rlpost.extensions.watching.log_lines import (
    LEVELS,
    LogSelection,
    first_day,
    merged,
    parse_since,
    prefixed,
    wall_seconds,
)

_MAX_UNTIMED = 1000
"""Lines of a log that are searched for a time, which may follow warnings of libraries."""


def main(arguments: Sequence[str]) -> int:
    """Print logs; with -f, follow the run to its end and return its exit code."""
    parser = Parser(prog="rlpost logs", description="The logs of a run.")
    add_run_options(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="follow the run over all attempts to its end"
    )
    parser.add_argument(
        "--node", metavar="HOST", help="the log of that node's agent instead of the driver's"
    )
    parser.add_argument(
        "--of",
        action="append",
        default=[],
        metavar="NAME",
        help="logs with this name instead, such as actor-0, 'engine-*' or '*'; repeatable",
    )
    parser.add_argument(
        "--level", choices=LEVELS, default="debug", help="lowest level to print (default: debug)"
    )
    parser.add_argument("--grep", type=_pattern, metavar="REGEX", help="only records that match")
    parser.add_argument(
        "--attempt", metavar="K", default="latest", help="attempt number (default: the latest)"
    )
    parser.add_argument(
        "--tail", type=int, metavar="N", help="only the last N records of all selected logs"
    )
    parser.add_argument(
        "--since",
        type=_since,
        metavar="AGO|TIME",
        help="only records from then on: 90s, 10m, 2h, 1d ago, or 14:30, or '2026-11-23 14:30'",
    )
    options = parser.parse_args(arguments)
    if options.tail is not None and (options.tail < 1 or options.follow):
        raise ConfigError(
            f"--tail {options.tail}: must be at least 1 record, and not with --follow, which prints "
            "all records as they come; leave one out"
        )
    run = find_run(options.run, options.runs_dir)
    names = [*options.of, *([f"agent-{options.node}"] if options.node else [])] or ["driver"]
    selection = LogSelection(names, options.level, options.grep)
    if options.follow:
        return follow(run, current_job(run), selection=selection, since=options.since)
    attempt = run.attempts / options.attempt
    has_driver_log = not _is_empty(attempt / DRIVER_LOG)
    if names != ["driver"] or has_driver_log or not _explain(attempt):
        _print(run, attempt, selection, options.tail, options.since)
    return 0


def _is_empty(path: Path) -> bool:
    return not path.exists() or not path.stat().st_size


def _explain(attempt: Path) -> bool:
    """Print why the driver of an ended attempt logged nothing; whether its verdict says so."""
    cause = cause_in(attempt / VERDICT_JSON)
    if not cause:
        return False
    logs = [path.stem for path in sorted(attempt.glob("*.log")) if not _is_empty(path)]
    print(f"{DRIVER_LOG} is empty: the driver did not start. Cause:\n{cause}")
    print("".join(f"see rlpost logs --of {name}\n" for name in logs), end="")
    return True


def _print(
    run: RunFolder, attempt: Path, selection: LogSelection, tail: int | None, since: float | None
) -> None:
    logs = {path.stem: path for path in attempt.glob("*.log") if selection.log(path.stem)}
    if not logs:
        raise ConfigError(_what_there_is(run, attempt, selection))
    width = max(map(len, logs))
    files = {name: _open_text(path) for name, path in logs.items()}
    try:
        records = merged(
            {name: selection.records(file) for name, file in files.items()},
            days={name: _first_day(path) for name, path in logs.items()},
            since=since,
        )
        for name, record in records if tail is None else deque(records, maxlen=tail):
            ended = record if record.endswith("\n") else record + "\n"
            print(ended if selection.is_one else prefixed(name, ended, width), end="")
    finally:
        for file in files.values():
            file.close()


def _open_text(path: Path) -> TextIOWrapper:
    return TextIOWrapper(open_regular(path), errors="replace")


def _first_day(path: Path) -> float:
    """The day of a log whose times have no date; foreign processes write such logs."""
    with _open_text(path) as file:
        modified = datetime.fromtimestamp(path.stat().st_mtime)
        return first_day(islice(file, _MAX_UNTIMED), modified)


def _since(given: str) -> float:
    try:
        return wall_seconds(parse_since(given, datetime.now()))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{given!r} is no time; use a duration such as 90s, 10m, 2h or 1d, or a time such as "
            "14:30 or '2026-11-23 14:30'"
        ) from None


def _pattern(given: str) -> re.Pattern[str]:
    try:
        return re.compile(given)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{given!r} is no regular expression: {error}") from None


def _what_there_is(run: RunFolder, attempt: Path, wanted: LogSelection) -> str:
    if not attempt.is_dir():
        attempts = sorted(
            (path.name for path in run.attempts.glob("[0-9]*")), key=lambda name: (len(name), name)
        )
        there = "the job has not started yet; see rlpost status"
        if attempts:
            there = f"there are {', '.join(attempts)}"
        return f"{attempt}: no such attempt; {there}"
    names = sorted(path.name for path in attempt.glob("*.log"))
    missing = ", ".join(f"{name}.log" for name in wanted.names)
    return f"{attempt}/{missing}: not written; there are {', '.join(names) or 'no logs yet'}"
