"""Rows of a report and the table of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "failed", "skipped"]
HEADER = ("check", "result", "s", "figures, or why")
LONGEST = 160
"""Characters of a cell."""


@dataclass(frozen=True)
class Row:
    """Result of one check."""

    check: str
    outcome: Outcome
    seconds: float
    note: str = ""
    """Figures of a check that passed, else the reason."""


def render(rows: Sequence[Row]) -> str:
    """A Markdown table with aligned columns, and the count of each outcome below it."""
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_line(line, widths) for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: Sequence[Row]) -> str:
    """``3 passed, 1 skipped in 12 s``."""
    counts = Counter(row.outcome for row in rows)
    counted = ", ".join(
        f"{counts[outcome]} {outcome}"
        for outcome in ("failed", "passed", "skipped")
        if counts[outcome]
    )
    return f"{counted or 'nothing was checked'} in {sum(row.seconds for row in rows):.0f} s"


def _cells(row: Row) -> tuple[str, ...]:
    return (_one_line(row.check), row.outcome, f"{row.seconds:.1f}", _one_line(row.note))


def _one_line(text: str) -> str:
    """Replace line breaks and the cell separator, and truncate."""
    flat = " ".join(text.split()).replace("|", "/")
    return flat if len(flat) <= LONGEST else f"{flat[: LONGEST - 3]}..."


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"
