"""A trace: the spans of many processes as JSON for Perfetto (ui.perfetto.dev) and chrome://tracing. Pure.

Input: for each process its name, its spans and how far its clock is from the driver's.
Output: the document of the Trace Event Format (Google, "Trace Event Format", complete events "X";
microseconds). Invariant: within one thread of the document spans are nested or apart, never
crossing: what overlaps otherwise, such as requests to a server or tasks of an event loop, goes to
further rows under the same process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.metrics.spans import Span


@dataclass(frozen=True, slots=True)
class ProcessSpans:
    """One process; ``ahead_s``: its clock less the driver's."""

    name: str
    spans: Sequence[Span]
    ahead_s: float = 0.0


def clock_offset(sent: float, theirs: float, received: float) -> float:
    """How far another clock is ahead, from one question and its answer (Cristian, "Probabilistic clock
    synchronization", 1989): 0 where the way there and back is longer than the difference, which then says nothing."""
    ahead = theirs - (sent + received) / 2
    return ahead if abs(ahead) > (received - sent) / 2 else 0.0


def trace(processes: Iterable[ProcessSpans], *, begin: float, end: float) -> dict[str, Any]:
    """The document, of what was under way between two moments of the driver's clock; its zero is ``begin``."""
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes, 1):
        events.append(_name("process_name", number, 0, process.name))
        row = 0
        threads: dict[str, list[Span]] = {}
        for one in process.spans:
            threads.setdefault(one[1], []).append(one)
        for thread, spans in sorted(threads.items()):
            moved = [(name, of, a - process.ahead_s, b - process.ahead_s) for name, of, a, b in spans]
            for lane_number, lane in enumerate(lanes(one for one in moved if one[3] > begin and one[2] < end), 1):
                row += 1
                events.append(
                    _name("thread_name", number, row, thread if lane_number == 1 else f"{thread}, {lane_number}")
                )
                events += [_event(one, number, row, begin) for one in lane]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin_unix_s": begin}}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """As few rows as a greedy choice finds, in each of which spans are nested or apart; each in order of begin."""
    rows: list[tuple[list[Span], list[float]]] = []  # each with the ends of what is open in it, the innermost last
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


def _event(one: Span, process: int, row: int, zero: float) -> dict[str, Any]:
    name, _, begin, end = one
    # Begin and end are rounded, not the duration: a span must not end after the one around it.
    start, stop = round((begin - zero) * 1e6), round((end - zero) * 1e6)
    return {"name": name, "cat": "phase", "ph": "X", "ts": start, "dur": stop - start, "pid": process, "tid": row}


def _name(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
