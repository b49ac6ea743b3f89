"""``rlpost sweep RECIPE --grid SETTING=VALUE,VALUE``: submit a run for each point of a grid.

Output: run folders ``RUNS_DIR/NAME-p0``, ``NAME-p1``, ... Each point is a separate job, not an
element of a job array: a run is requeued, chained, cancelled and resumed by its job, and points may
differ in nodes and time. Every other command accepts the runs like any other run. Without Slurm
they run one after another.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from common.exit_codes import EXIT_PREEMPTED
from common.units import counted
from rlpost.cli.command_line import no_recipe, settings
from rlpost.cli.secret_file import take_keys
from rlpost.cli.submit import check_run, print_notes, submit_main, submit_parser
from rlpost.config.flags import fields, flag
from rlpost.config.keys import KEYS
from rlpost.config.load import Loaded
from rlpost.config.masking import masked_words
from rlpost.config.wording import COMMAND_LINE
from rlpost.errors import ConfigError, suggestion
from slurm.variables import unknown_variables

MAX_POINTS = 256
GRID = "--grid"
_REFUSED = ("run_folder", "resume", "debug", "test_only", "rehearse")
"""Options of ``rlpost submit`` that apply to one run only."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: the name of its folder and its values by setting."""

    run: str
    values: Mapping[str, str]

    @property
    def label(self) -> str:
        """The values in one line.

        >>> Point("s-p0", {"lr": "1e-6", "seed": "2"}).label
        'lr=1e-6 seed=2'
        """
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def arguments(self) -> list[str]:
        """The flags that set the values."""
        return [word for key, value in self.values.items() for word in (flag(key), value)]


def parse_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each setting. Raises ConfigError.

    >>> parse_grid(["lr=1e-6,2e-6", "--seed=1"])
    {'lr': ['1e-6', '2e-6'], 'seed': ['1']}
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        name, _, text = word.partition("=")
        key, values = name.removeprefix("--").replace("-", "_"), text.split(",")
        if not all(values):
            raise ConfigError(
                f"{GRID} {word}: must be SETTING=VALUE,VALUE; for instance lr=1e-6,2e-6"
            )
        if key not in fields():
            raise ConfigError(f"{GRID} {word}: no setting {key}{suggestion(key, fields())}")
        if key in grid or len(set(values)) < len(values):
            raise ConfigError(f"{GRID} {word}: each setting and each value once")
        grid[key] = values
    return grid


def points_of(name: str, grid: Mapping[str, Sequence[str]]) -> list[Point]:
    """Return the points of a grid; the last setting varies fastest. Raises ConfigError."""
    rows = list(itertools.islice(itertools.product(*grid.values()), MAX_POINTS + 1))
    if len(rows) > MAX_POINTS:
        raise ConfigError(
            f"{GRID}: more than {MAX_POINTS} points, each a job; give fewer values, or several sweeps"
        )
    return [
        Point(f"{name}-p{number}", dict(zip(grid, row, strict=True)))
        for number, row in enumerate(rows)
    ]


def main(arguments: Sequence[str]) -> int:
    """Check all points, then submit them. Returns 1 if a run on this machine failed."""
    parser = submit_parser("rlpost sweep", "Submit a run for each point of a grid.")
    parser.add_argument(
        GRID,
        nargs="+",
        action="extend",
        default=[],
        metavar="SETTING=VALUE,VALUE",
        help="values of a setting; with several settings, all combinations",
    )
    parser.add_argument("--name", help="name of the sweep (default: JOB_NAME-sweep-TIME)")
    options, loaded = settings(parser, arguments or ["--help"])
    if not options.grid:
        raise ConfigError(
            f"{GRID} is missing: give SETTING=VALUE,VALUE; rlpost list and rlpost compare show runs"
        )
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = options.name or f"{loaded.config.cluster.job_name}-sweep-{stamp}"
    if name != Path(name).name or not name.strip("."):
        raise ConfigError(f"--name {name}: must be the name of a folder, without /")
    points = points_of(name, parse_grid(options.grid))
    _check_options(options, points[0], loaded)
    runs_dir = Path(loaded.config.cluster.runs_dir)
    common = submitted_arguments(arguments)
    notes = unknown_variables(os.environ)  # with those of all points, each once
    for point in points:
        notes += _check_point(point, [*common, *point.arguments], runs_dir / point.run, options)
    print_notes(notes)
    options.told = set(notes)
    codes = _submit_all(points, common, runs_dir, options)
    if not options.dry_run:
        shown = f"{name}-p0 ... {points[-1].run}" if len(points) > 1 else points[0].run
        print(
            f"{len(codes)} of {counted(len(points), 'run')}: {shown}; rlpost list shows their states, "
            "rlpost compare their curves"
        )
    return int(any(codes))


def submitted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words that every run of the sweep is submitted with: without those of the sweep.

    >>> submitted_arguments(["tiny", "--grid", "lr=1,2", "seed=1", "--name", "s", "--local"])
    ['tiny', '--local']
    """
    kept: list[str] = []
    skipped = ""  # the option whose values follow
    for word in arguments:
        option, has_value, _ = word.partition("=")
        if option in (GRID, "--name"):
            # argparse takes no further values after one that is joined by "="
            skipped = "" if has_value else option
        elif skipped and not word.startswith("--"):
            skipped = GRID if skipped == GRID else ""
        else:
            skipped = ""
            kept.append(word)
    return kept


def _check_options(options: argparse.Namespace, point: Point, loaded: Loaded) -> None:
    if options.recipe is None:
        raise no_recipe("rlpost sweep tiny --grid lr=1e-6,2e-6")
    if refused := next((name for name in _REFUSED if getattr(options, name)), None):
        raise ConfigError(f"{flag(refused)}: means one run; use rlpost submit")
    for key in point.values:
        if loaded.origins.get(f"{fields()[key]}.{key}") == COMMAND_LINE:
            raise ConfigError(f"{flag(key)}: {GRID} has it as well; leave one out")


def _check_point(
    point: Point, arguments: Sequence[str], root: Path, options: argparse.Namespace
) -> list[str]:
    """Check the run of a point and return its notes. Raises ConfigError."""
    try:
        given, loaded = settings(submit_parser("rlpost sweep", ""), arguments)
        if root.exists() and not options.dry_run:
            raise ConfigError(f"--name: {root} exists; use another name")
        return check_run(given, loaded, root)[2]
    except ConfigError as error:
        raise ConfigError(f"{point.label}: {error}; nothing was submitted") from error


def _submit_all(
    points: Sequence[Point], common: Sequence[str], runs_dir: Path, options: argparse.Namespace
) -> list[int]:
    """Submit the points in order; return the exit code of each.

    Stops after a run that was stopped while it was followed, as with Ctrl-C. Raises ConfigError
    if a submission fails. Either way the commands that submit the rest are named.
    """
    # A submission moves the keys out of the environment; each run gets them.
    keys = {name: os.environ[name] for name in KEYS if name in os.environ}
    codes: list[int] = []
    runs = [
        [*common, *point.arguments, "--run-folder", str(runs_dir / point.run)] for point in points
    ]
    for number, point in enumerate(points):
        os.environ.update(keys)
        print(f"{'# ' if options.dry_run else ''}{point.run}: {point.label}")
        try:
            codes.append(submit_main(runs[number], told=options.told))
        except ConfigError as error:
            _print_commands("the others", runs[number:])
            raise ConfigError(
                f"{point.run}: {error}\n{number} of {counted(len(points), 'run')} were submitted"
            ) from error
        if codes[-1] == EXIT_PREEMPTED and point is not points[-1]:
            _print_commands(f"{point.run} was stopped; the others", runs[number + 1 :])
            break
    return codes


def _print_commands(heading: str, runs: Sequence[Sequence[str]]) -> None:
    print(f"{heading}:")
    for words in runs:
        print(shlex.join(["rlpost", "submit", *masked_words(take_keys(words, {}))]))
