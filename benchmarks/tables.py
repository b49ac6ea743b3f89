"""Parts of a benchmark's section: a table, and the machine and date of the measurement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def machine() -> str:
    """Processors, their load, the day."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} CPU cores, load at the start {load:.1f}, {datetime.now(UTC):%-d %B %Y}"
    )
