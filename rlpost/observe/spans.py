"""Spans: named time intervals of a process, and the trace of a run. Standard library only.

Input: ``with span("train"):`` anywhere in driver, actors and engine servers.
Output: the newest MAX_SPANS spans, on request, and the trace of all processes. Recording is always
on, at the cost of two clock reads and a tuple per span. Times are wall-clock seconds: the wall
clock is read once at process start and advanced by the monotonic clock, so adjustments of the
system clock do not shift spans of one process against each other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MAX_SPANS = 50_000

Span = tuple[str, str, float, float]
"""Name, thread name, start and end; times in seconds."""


class Spans:
    """The newest spans of one process. Thread-safe."""

    def __init__(self, at_most: int = MAX_SPANS) -> None:
        self._kept: deque[Span] = deque(maxlen=at_most)
        self._began = time.time() - time.perf_counter()

    def now(self) -> float:
        """Return the wall-clock time in seconds since the epoch."""
        return self._began + time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as a span, also if it raises."""
        begin = self.now()
        try:
            yield
        finally:
            self.add(name, begin)

    def add(self, name: str, begin: float) -> None:
        """Record a span from ``begin`` until now, for code that is not a block."""
        self._kept.append((name, threading.current_thread().name, begin, self.now()))

    def since(self, moment: float) -> list[Span]:
        """Return the spans that ended after ``moment``, in order of their ends."""
        return [one for one in list(self._kept) if one[3] > moment]

    def seconds(self, name: str, *, since: float) -> float | None:
        """Return the total seconds of spans ``name`` ended after ``since``; None without any."""
        found = [end - begin for kind, _, begin, end in self.since(since) if kind == name]
        return sum(found) if found else None


SPANS = Spans()
"""The spans of this process."""
span = SPANS.span


def clock_and_spans(since: float) -> tuple[float, list[Span]]:
    """Return this process's clock and its spans that ended after ``since``, for the driver."""
    return SPANS.now(), SPANS.since(since)


@dataclass(frozen=True, slots=True)
class ProcessSpans:
    """The spans of one process; ``ahead_s`` is its clock minus the driver's, in seconds."""

    name: str
    spans: Sequence[Span]
    ahead_s: float = 0.0


def clock_offset(sent: float, theirs: float, received: float) -> float:
    """Estimate from one round trip how far another clock is ahead, in seconds.

    Cristian, "Probabilistic clock synchronization", 1989. Returns 0 if the difference is within the
    uncertainty of half the round-trip time.
    """
    ahead = theirs - (sent + received) / 2
    return ahead if abs(ahead) > (received - sent) / 2 else 0.0


def trace(processes: Iterable[ProcessSpans], *, begin: float, end: float) -> dict[str, object]:
    """Return the trace of the spans that overlap ``begin`` to ``end`` on the driver's clock.

    The document is for Perfetto (ui.perfetto.dev) and chrome://tracing: Google's "Trace Event
    Format", complete events "X", microseconds from ``begin``. Spans of one row are nested or
    disjoint; those that overlap partially, such as requests to a server or tasks of an event loop,
    get additional rows under the same process.
    """
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes, 1):
        events.append(_name("process_name", number, 0, process.name))
        row = 0
        threads: dict[str, list[Span]] = {}
        for one in process.spans:
            threads.setdefault(one[1], []).append(one)
        for thread, spans in sorted(threads.items()):
            moved = [
                (name, of, a - process.ahead_s, b - process.ahead_s) for name, of, a, b in spans
            ]
            overlapping = [one for one in moved if one[3] > begin and one[2] < end]
            for lane_number, lane in enumerate(lanes(overlapping), 1):
                row += 1
                label = thread if lane_number == 1 else f"{thread}, {lane_number}"
                events.append(_name("thread_name", number, row, label))
                events += [_event(one, number, row, begin) for one in lane]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin_unix_s": begin}}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Assign spans greedily to rows in which they are nested or disjoint, in order of start."""
    rows: list[tuple[list[Span], list[float]]] = []  # with the ends of open spans, innermost last
    for one in sorted(spans, key=lambda one: (one[2], -one[3])):
        begin, end = one[2], one[3]
        for _, ends in rows:
            while ends and ends[-1] <= begin:
                ends.pop()
        row, ends = next((each for each in rows if not each[1] or end <= each[1][-1]), ([], []))
        if not row:
            rows.append((row, ends))
        row.append(one)
        ends.append(end)
    return [row for row, _ in rows]


def _event(one: Span, process: int, row: int, zero: float) -> dict[str, object]:
    name, _, begin, end = one
    # Round begin and end, not the duration: a span must not end after the enclosing one.
    start, stop = round((begin - zero) * 1e6), round((end - zero) * 1e6)
    return {
        "name": name,
        "cat": "phase",
        "ph": "X",
        "ts": start,
        "dur": stop - start,
        "pid": process,
        "tid": row,
    }


def _name(kind: str, process: int, row: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
