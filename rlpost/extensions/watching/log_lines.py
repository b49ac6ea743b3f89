"""Filter and merge the lines of an attempt's logs. Pure.

Input: lines by the name of their log.
Output: the selected records in order of time, prefixed with the name of their log. A record is a
line that begins with a time, with the lines after it that do not; it is selected as a whole. Lines
of JSON (``common.log_format``) are records as well. Times are seconds of local wall-clock time.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from fnmatch import fnmatch

from common.log_format import DIAGNOSTICS

LEVELS = ("debug", "info", "warning", "error")
_TIME = re.compile(
    r'(?:\[|\{"time": ")?(?:(\d{4}-\d\d-\d\d)[ T])?(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?'
)
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
_RANK = {"DEBUG": 0, "INFO": 1, "WARNING": 2, "WARN": 2, "ERROR": 3, "CRITICAL": 3, "FATAL": 3}
_HEAD = 80  # characters of a record in which its level is searched
_MESSAGE_HEAD = 240  # and the beginning of its message, which follows logger and process in JSON
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class LogSelection:
    """A selection of logs and records.

    Attributes:
        names: patterns of log names, without the suffix.
        level: the lowest level; records without a level count as ``info``.
        pattern: records must match it; None selects all.
        has_diagnostics: whether records that ``common.log_format.DIAGNOSTICS`` begins are selected.
    """

    names: Sequence[str] = ("driver",)
    level: str = "debug"
    pattern: re.Pattern[str] | None = None
    has_diagnostics: bool = True

    def log(self, name: str) -> bool:
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
        if not self.has_diagnostics and DIAGNOSTICS in record[:_MESSAGE_HEAD]:
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


def merged(
    logs: Mapping[str, Iterable[str]],
    *,
    days: Mapping[str, float] | None = None,
    since: float | None = None,
) -> Iterator[tuple[str, str]]:
    """Return (name, record) pairs of several logs in order of time.

    Records before the first time of a log come first.

    Args:
        days: the second at which the day of the first record of a log begins, where its times have
            no date.
        since: the second from which records are returned.
    """
    starts = days or {}
    timed = [_timed(name, records, starts.get(name, 0.0)) for name, records in sorted(logs.items())]
    for seconds, name, record in heapq.merge(*timed, key=lambda one: one[0]):
        if since is None or seconds >= since:
            yield name, record


def _timed(name: str, records: Iterable[str], day: float) -> Iterator[tuple[float, str, str]]:
    """Yield (seconds, name, record), with times that never decrease within a log.

    Without a date, a decrease of more than half a day is a new day. A smaller decrease repeats the
    previous time.
    """
    latest, is_first = day, True
    for record in records:
        if match := _TIME.match(record):
            hours, minutes, seconds = (int(match[n]) for n in (2, 3, 4))
            now = 3600 * hours + 60 * minutes + seconds + float(f"0.{match[5] or 0}")
            if (dated := _day(match[1])) is not None:
                now += dated
            else:
                now += latest // DAY * DAY
                now = now + DAY if latest - now > DAY / 2 else now
            # heapq.merge needs times that never decrease; threads may log slightly out of order.
            latest, is_first = now if is_first else max(latest, now), False
        yield latest, name, record


def _day(text: str | None) -> float | None:
    """The second at which a day begins; None without a date, or with an invalid one."""
    try:
        return None if text is None else date.fromisoformat(text).toordinal() * DAY
    except ValueError:
        return None


def wall_seconds(moment: datetime) -> float:
    """Return a local time as seconds, as those of records."""
    of_day = moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6
    return moment.toordinal() * DAY + of_day


def first_day(lines: Iterable[str], modified: datetime) -> float:
    """Return the second at which the day of a log's first timed record begins.

    For logs whose times have no date.

    Args:
        lines: of the log, from its beginning.
        modified: local time of the log's last change: the log is taken to be shorter than a day.
    """
    today = modified.toordinal() * DAY
    found = next(filter(None, map(_TIME.match, lines)), None)
    if found is None:
        return today
    of_day = int(found[2]) * 3600 + int(found[3]) * 60 + int(found[4])
    return today - DAY if today + of_day > wall_seconds(modified) + 1 else today


def parse_since(text: str, now: datetime) -> datetime:
    """Return the local time of ``10m``, ``14:30`` or ``2026-11-23 14:30``. Raises ValueError.

    A time of day stands for its latest occurrence in the past.

    >>> parse_since("90m", datetime(2026, 11, 23, 1, 0))
    datetime.datetime(2026, 11, 22, 23, 30)
    >>> parse_since("14:30", datetime(2026, 11, 23, 1, 0))
    datetime.datetime(2026, 11, 22, 14, 30)
    """
    if match := _AGO.fullmatch(text):
        return now - timedelta(**{_UNITS[match[2]]: float(match[1])})
    if re.fullmatch(r"\d\d:\d\d(?::\d\d)?", text):
        today = datetime.fromisoformat(f"{now:%Y-%m-%d} {text}")
        return today if today <= now else today - timedelta(days=1)
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is None else moment.astimezone().replace(tzinfo=None)


def prefixed(name: str, record: str, width: int) -> str:
    """Return a record with the name of its log before every line."""
    return "".join(f"{name:<{width}} | {line}" for line in record.splitlines(keepends=True))
