"""Startup time of commands that do nothing: cold starts of an installed wheel, compared with
``python -c pass``.

    python -m benchmarks.cold_start [--repeat 15] [--write]

The wheel is built from the checkout and installed in a separate environment
(``tests/installed.py``). Commands run in turn, each in a new process; the first round fills the
caches of the file system and does not count. --write puts the table into docs/benchmarks.md,
section "Cold start".
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page import machine, make_parser, show, table
from tests.installed import build_wheel, clean_environment
from tests.unit.cli.projects import make_project

HEADING = "## Cold start"
INTRODUCTION = """\
The wheel in a separate environment with its requirements only. Wall time of commands that run in turn, each in a new
process, {repeat} rounds in one run; {machine}, Python {python}:

```bash
python -m benchmarks.cold_start --write
```
"""


def commands(programs: Path) -> dict[str, list[str]]:
    """The measured commands."""
    rlpost = str(programs / "rlpost")
    return {
        "python -c pass": [str(programs / "python"), "-c", "pass"],
        "rlpost --help": [rlpost, "--help"],
        "rlpost list": [rlpost, "list"],
        "rlpost submit --help": [rlpost, "submit", "--help"],
        "rlpost check RECIPE": [rlpost, "check", "recipe.toml"],
    }


def measure(programs: Path, project: Path, repeat: int) -> list[Sequence[str]]:
    """One row per command: median, minimum and maximum seconds."""
    times: dict[str, list[float]] = {name: [] for name in commands(programs)}
    for _ in range(repeat + 1):
        for name, command in commands(programs).items():
            started_at = time.perf_counter()
            subprocess.run(command, cwd=project, check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - started_at)
    rows = []
    for name, seen in times.items():
        counted = seen[1:]
        figures = (statistics.median(counted), min(counted), max(counted))
        rows.append((f"`{name}`", *(f"{figure:.3f}" for figure in figures)))
    return rows


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="rounds (default: 15)")
    options = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        programs = clean_environment(
            Path(folder) / "venv", build_wheel(Path(folder) / "build").wheel
        )
        rows = measure(programs, make_project(Path(folder) / "project"), options.repeat)
    python = ".".join(map(str, sys.version_info[:3]))
    introduction = INTRODUCTION.format(repeat=options.repeat, machine=where, python=python)
    lines = table(("command", "median s", "least", "most"), rows)
    show(HEADING, [introduction, *lines], write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
