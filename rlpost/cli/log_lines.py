"""The lines of an attempt's logs, of several at once: which of them are wanted, and in what order. Pure.

Input: lines of logs by the log's name.
Output: those that are asked for, in order of their time, with the name before them. A record is a
line that begins with a time of day, and the lines after it that do not; it is wanted or not as a
whole.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

LEVELS = ("debug", "info", "warning", "error")
_TIME = re.compile(r"\[?(?:\d{4}-\d\d-\d\d[ T])?(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
_RANK = {"DEBUG": 0, "INFO": 1, "WARNING": 2, "WARN": 2, "ERROR": 3, "CRITICAL": 3, "FATAL": 3}
_HEAD = 80  # letters of a line in which its level stands
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logs, by patterns of their names without the ending, and which of their records: those of ``level`` and
    above (a record that names none is one of ``info``) in which ``pattern`` is found."""

    names: Sequence[str] = ("driver",)
    level: str = "debug"
    pattern: re.Pattern[str] | None = None

    def log(self, name: str) -> bool:
        """Whether a log is one of them."""
        return any(fnmatch(name, pattern) for pattern in self.names)

    def records(self, lines: Iterable[str]) -> Iterator[str]:
        """Those of a log that are wanted, each as one text."""
        return (record for record in _records(lines) if self._wants(record))

    @property
    def is_one(self) -> bool:
        """Whether it can only be one log, whose name need not stand before every line."""
        return len(self.names) == 1 and not set(self.names[0]) & set("*?[")

    def _wants(self, record: str) -> bool:
        found = _LEVEL.search(record[:_HEAD])
        if _RANK[found[1] if found else "INFO"] < LEVELS.index(self.level):
            return False
        return self.pattern is None or self.pattern.search(record) is not None


def _records(lines: Iterable[str]) -> Iterator[str]:
    held = ""
    for line in lines:
        if held and _TIME.match(line):
            yield held
            held = ""
        held += line
    if held:
        yield held


def merged(logs: dict[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """(name, record) of several logs in order of time; what a log says before its first time comes first."""
    timed = [_timed(name, records) for name, records in sorted(logs.items())]
    return ((name, record) for _, name, record in heapq.merge(*timed, key=lambda one: one[0]))


def _timed(name: str, records: Iterable[str]) -> Iterator[tuple[float, str, str]]:
    """Times never fall within a log: one that seems to is a day later when it falls far, and else as late as the one
    before."""
    latest = 0.0
    for record in records:
        if found := _TIME.match(record):
            hours, minutes, seconds = (int(found[n]) for n in (1, 2, 3))
            now = 3600 * hours + 60 * minutes + seconds + float(f"0.{found[4] or 0}")
            now += latest // _DAY * _DAY
            latest = max(latest, now + _DAY if latest - now > _DAY / 2 else now)
        yield latest, name, record


def prefixed(name: str, record: str, width: int) -> str:
    """A record with the name of its log before every line."""
    return "".join(f"{name:<{width}} | {line}" for line in record.splitlines(keepends=True))
