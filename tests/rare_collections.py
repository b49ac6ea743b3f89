"""Garbage collection for processes of the tests, whose modules live to their end."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Exempt all present objects from collection, and collect others rarely.

    Scanning modules and collected tests again and again would take a sixth of a session's time.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
