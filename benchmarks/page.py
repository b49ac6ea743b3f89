"""Write a benchmark's section of docs/benchmarks.md."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"


def show(heading: str, lines: Sequence[str], *, write: bool) -> None:
    """Print a section, and with ``write`` put it into the page."""
    section = "\n".join([heading, "", *lines, ""])
    print(section)
    if write:
        put_section(heading, section)


def put_section(heading: str, section: str) -> None:
    """Put the section in the place of the old one with this heading, or at the end of the page."""
    text = PAGE.read_text() if PAGE.exists() else "# Benchmarks\n"
    before, found, rest = text.partition(heading + "\n")
    after = re.search(r"^## ", rest, re.MULTILINE)
    tail = rest[after.start() :] if found and after else ""
    with tempfile.NamedTemporaryFile("w", dir=PAGE.parent, delete=False) as file:
        file.write(before.rstrip() + "\n\n" + section + ("\n" + tail if tail else ""))
    Path(file.name).chmod(0o644)
    Path(file.name).replace(PAGE)
