"""Time and memory of ``rlpost rehearse`` for whole recipes, each in a separate process.

    python -m benchmarks.rehearsal [RECIPE ...] [--write]

Processor time depends less on other processes of the machine than elapsed time does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import machine, make_parser, show, table

HEADING = "## Rehearsal"
ROOT = Path(__file__).parents[1]
RECIPES = ("qwen3_4b", "glm45_355b")
HANGS = "collectives in the same order, with matching shapes"
HEADER = (
    "recipe", "ranks", "classes of equal ranks", "ranks that ran the step",
    "collectives and transfers", "processor s", "elapsed s",
    "host memory GB", "result",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """One rehearsal: its object, and what its process took."""

    found: dict[str, Any]
    processor_s: float
    elapsed_s: float
    num_bytes: int

    def row(self, recipe: str) -> tuple[str, ...]:
        """The cells of a recipe."""
        found = self.found
        calls = next(one["extent"] for one in found["checks"] if one["name"] == HANGS)
        return (
            f"`{recipe}.toml`",
            str(len(found["memory"])),
            str(len(found["classes"])),
            str(len(found["ran"])),
            calls,
            f"{self.processor_s:.0f}",
            f"{self.elapsed_s:.0f}",
            f"{self.num_bytes / 1e9:.1f}",
            found["first_fault"] or "no fault",
        )


def measure(recipe: str) -> Measured:
    """Rehearse a recipe as a user does."""
    path = str(ROOT / "jobs" / "recipes" / f"{recipe}.toml")
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlpost", "rehearse", path, "--json"],
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        found = json.load(output)
    return Measured(
        found, usage.ru_utime + usage.ru_stime, found["seconds"], usage.ru_maxrss * 1024
    )


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and with ``--write`` put the section into the page."""
    parser = make_parser(__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    options = parser.parse_args(arguments)
    where = machine()
    rows = [measure(recipe).row(recipe) for recipe in options.recipes]
    lines = [f"`python -m benchmarks.rehearsal --write`; {where}.", "", *table(HEADER, rows)]
    show(HEADING, lines, write=options.write)


if __name__ == "__main__":
    main(sys.argv[1:])
