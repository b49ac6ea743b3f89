"""Spans: what this process did and when, for the trace of a run. Standard library only.

Input: ``with span("train"):`` anywhere in driver, actors and engine servers.
Output: the last MAX_SPANS of them, on request. Every process always keeps them: that costs two
looks at the clock and a tuple each, and nothing has to be switched on before a step that somebody
wants to see. Times are wall-clock seconds, read once when the process starts and counted on by the
monotonic clock, so that a correction of the machine's clock moves no span against another of its
process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SPANS = 50_000

Span = tuple[str, str, float, float]
"""Name, thread, begin and end."""


class Spans:
    """The newest spans of one process. Any thread may add."""

    def __init__(self, at_most: int = MAX_SPANS) -> None:
        self._kept: deque[Span] = deque(maxlen=at_most)
        self._began = time.time() - time.perf_counter()

    def now(self) -> float:
        """Seconds of the wall clock."""
        return self._began + time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What the block does has this name; it is kept when the block ends, however it does."""
        begin = self.now()
        try:
            yield
        finally:
            self.add(name, begin)

    def add(self, name: str, begin: float) -> None:
        """A span that ends now, for what is no block."""
        self._kept.append((name, threading.current_thread().name, begin, self.now()))

    def since(self, moment: float) -> list[Span]:
        """Those that ended after ``moment``, in order of their ends."""
        return [one for one in list(self._kept) if one[3] > moment]

    def seconds(self, name: str, *, since: float) -> float | None:
        """How long spans of a name lasted that ended after ``since``; None when there was none."""
        found = [end - begin for kind, _, begin, end in self.since(since) if kind == name]
        return sum(found) if found else None


SPANS = Spans()
"""Those of this process."""
span = SPANS.span


def told(since: float) -> tuple[float, list[Span]]:
    """The clock and the spans of this process: what the driver asks of every other."""
    return SPANS.now(), SPANS.since(since)
