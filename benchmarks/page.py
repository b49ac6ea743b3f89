"""Parts that benchmarks share: command-line options, tables, and sections of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"


def make_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --write; its help is the benchmark's module docstring."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write into docs/benchmarks.md")
    return parser


def machine() -> str:
    """Return the number of processors, their load, and the date."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} CPU cores, load at the start {load:.1f}, {datetime.now(UTC):%-d %B %Y}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def show(heading: str, lines: Sequence[str], *, write: bool, page: Path = PAGE) -> None:
    """Print a section; with ``write`` also put it into a page."""
    section = "\n".join([heading, "", *lines, ""])
    print(section)
    if write:
        _put_section(heading, section, page)


def _put_section(heading: str, section: str, page: Path) -> None:
    """Replace the section with this heading, or append it to the page.

    Subsections stay: they have figures that no program measures any more.
    """
    text = page.read_text() if page.exists() else "# Benchmarks\n"
    before, found, rest = text.partition(heading + "\n")
    after = re.search(r"^###? ", rest, re.MULTILINE)
    tail = rest[after.start() :] if found and after else ""
    with tempfile.NamedTemporaryFile("w", dir=page.parent, delete=False) as file:
        file.write(before.rstrip() + "\n\n" + section + ("\n" + tail if tail else ""))
    Path(file.name).chmod(0o644)
    Path(file.name).replace(page)
