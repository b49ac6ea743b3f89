"""Filters and merges the lines of an attempt's logs. Pure.

Input: lines by the name of their log.
Output: the selected records in order of time, prefixed with the name of their log. A record is a
line that begins with a time of day, with the lines after it that do not; it is selected as a whole.
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
_HEAD = 80  # characters of a record in which its level is searched
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A selection of logs and records.

    Attributes:
        names: patterns of log names, without the suffix.
        level: the lowest level; records without a level count as ``info``.
        pattern: records must match it; None selects all.
    """

    names: Sequence[str] = ("driver",)
    level: str = "debug"
    pattern: re.Pattern[str] | None = None

    def log(self, name: str) -> bool:
        """Return whether a log is selected."""
        return any(fnmatch(name, pattern) for pattern in self.names)

    def records(self, lines: Iterable[str]) -> Iterator[str]:
        """Return the selected records of a log, each as one string."""
        return (record for record in _records(lines) if self._wants(record))

    @property
    def is_one(self) -> bool:
        """Whether at most one log is selected, so that lines need no prefix."""
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
    """Return (name, record) pairs of several logs in order of time.

    Records before the first time of a log come first.
    """
    timed = [_timed(name, records) for name, records in sorted(logs.items())]
    return ((name, record) for _, name, record in heapq.merge(*timed, key=lambda one: one[0]))


def _timed(name: str, records: Iterable[str]) -> Iterator[tuple[float, str, str]]:
    """Yield (seconds, name, record), with times that never decrease within a log.

    A decrease of more than half a day is a new day; a smaller one repeats the previous time.
    """
    latest = 0.0
    for record in records:
        if found := _TIME.match(record):
            hours, minutes, seconds = (int(found[n]) for n in (1, 2, 3))
            now = 3600 * hours + 60 * minutes + seconds + float(f"0.{found[4] or 0}")
            now += latest // _DAY * _DAY
            latest = max(latest, now + _DAY if latest - now > _DAY / 2 else now)
        yield latest, name, record


def prefixed(name: str, record: str, width: int) -> str:
    """Return a record with the name of its log before every line."""
    return "".join(f"{name:<{width}} | {line}" for line in record.splitlines(keepends=True))
