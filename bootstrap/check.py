"""One question about a host or an image, and how bad the answer is. Standard library of Python 3.8 and later.

Levels, from the best to the worst:

    OK
    WARN          continues, but may be slow or fail later
    EXCLUDE_NODE  this host is unfit, another may be fit
    FATAL_CONFIG  no host can be fit, because the request is wrong: the image lacks something, or the same check
                  excludes all of several hosts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Sequence, get_args  # noqa: UP035

Level = Literal["OK", "WARN", "EXCLUDE_NODE", "FATAL_CONFIG"]
LEVELS = get_args(Level)

GIB = 1 << 30
UNLIMITED = -1
"""A limit of the kernel that is none."""


@dataclass(frozen=True)
class Check:
    """One row of a table. ``found`` says what was got and, unless OK, what is needed and how to get it."""

    name: str
    level: Level
    found: str


def level_of(checks: Sequence[Check]) -> Level:
    """The worst level among the checks; OK without any."""
    return max((check.level for check in checks), key=LEVELS.index, default="OK")
