"""The STOP file of an attempt: a request to save and end the run.

Several processes may write it: the batch script at USR2 (bash, ``slurm/render.py``), an agent at
TERM or when its deadline is near, a local run at Ctrl-C, ``rlpost cancel``. Only the first write
takes effect, so its reason and deadline apply. Agents and the driver poll the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.files import text_or_empty, write_first


@dataclass(frozen=True, slots=True)
class StopMessage:
    """The content of a STOP file; times in seconds since 1970, None where unknown."""

    reason: str
    time: float | None = None
    """Time of the signal, from the clock of the host that wrote the file."""
    deadline: float | None = None
    """Time at which the run is killed."""


def parse_stop(text: str) -> StopMessage:
    """Parse a STOP file: JSON from a program, or plain text that a user wrote.

    >>> parse_stop('{"reason": "USR2", "time": 100, "deadline": "N/A"}')
    StopMessage(reason='USR2', time=100.0, deadline=None)
    """
    text = text.strip()
    try:
        raw = json.loads(text)
        return StopMessage(
            str(raw["reason"]), _seconds(raw.get("time")), _seconds(raw.get("deadline"))
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return StopMessage(text or "no reason given")


def write_stop(path: Path, message: StopMessage) -> bool:
    """Write the file unless it exists; return whether this call wrote it. Raises OSError."""
    now = None if message.time is None else round(message.time, 3)
    content = {"reason": message.reason, "time": now, "deadline": message.deadline}
    return write_first(path, json.dumps(content) + "\n")


def read_deadline(path: Path) -> float | None:
    """The deadline in a STOP file; None without a file or without a deadline."""
    return parse_stop(text_or_empty(path)).deadline


def _seconds(value: float | str | None) -> float | None:
    try:
        seconds = math.nan if value is None else float(value)
    except (TypeError, ValueError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
