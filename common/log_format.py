"""The format of log lines of every process: dated text, or one JSON object a line.

Input: a format, chosen with ``--log-format`` and passed to child processes in the environment.
Output: the logging configuration of a process; JSON lines converted back to text for readers.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime

VARIABLE = "RLPOST_LOG_FORMAT"
FORMATS = ("text", "json")
DATE = "%Y-%m-%d %H:%M:%S"
DIAGNOSTICS = "diagnostics: "
"""Begins the message of a record that ``rlpost submit`` leaves to the log: it is no failure."""


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (ISO 8601 with offset), level, logger, source, message.

    A traceback is part of the message, as in text. ``source`` names the process.
    """

    def __init__(self, source: str = "") -> None:
        super().__init__("%(message)s")
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        when = datetime.fromtimestamp(record.created).astimezone()
        found = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "source": self._source,
            "message": super().format(record),
        }
        return json.dumps(found)


def configure_logging(
    source: str = "",
    *,
    with_logger: bool = False,
    log_format: str | None = None,
    force: bool = False,
) -> None:
    """Log from level INFO on to standard error.

    Args:
        source: name of the process, for every line.
        with_logger: name the logger in text lines.
        log_format: replaces the format in the environment, which child processes inherit.
    """
    if log_format is not None:
        os.environ[VARIABLE] = log_format
    handler = logging.StreamHandler()
    if os.environ.get(VARIABLE) == "json":
        handler.setFormatter(JsonFormatter(source))
    else:
        named = " %(name)s:" if with_logger else ""
        source_word = " " + source.replace("%", "%%") if source else ""
        text = f"%(asctime)s.%(msecs)03d %(levelname)s{source_word}{named} %(message)s"
        handler.setFormatter(logging.Formatter(text, DATE))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=force)


def as_text(line: str) -> str:
    """Return a line of a JSON log as text; other lines as they are.

    >>> as_text('{"time": "2026-11-23T12:00:00.250+00:00", "level": "INFO", "message": "up"}')
    '2026-11-23 12:00:00.250 INFO up'
    """
    if not line.startswith('{"time": '):
        return line
    try:
        record = json.loads(line)
        when = datetime.fromisoformat(record["time"])
        words = [
            f"{when.strftime(DATE)}.{when.microsecond // 1000:03d}",
            record["level"],
            record.get("source", ""),
            record["message"],
        ]
        return " ".join(word for word in words if word)
    except (ValueError, KeyError, TypeError):
        return line
