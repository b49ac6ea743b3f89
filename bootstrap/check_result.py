"""Result of one check of a host or an image. Standard library of Python 3.8 and later.

Levels, from the least to the most severe:

    OK
    WARN          continues, but may be slow or fail later
    EXCLUDE_NODE  this host is unfit; another host may be fit
    FATAL_CONFIG  no host can be fit: the image lacks something, or a check excludes all hosts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Sequence, get_args  # noqa: UP035

Level = Literal["OK", "WARN", "EXCLUDE_NODE", "FATAL_CONFIG"]
LEVELS = get_args(Level)

GIB = 1 << 30
UNLIMITED = -1
"""Value of a kernel limit that is not set."""


@dataclass(frozen=True)
class Check:
    """One row of a table.

    ``found``: the observed value and, unless OK, the required one and the remedy.
    """

    name: str
    level: Level
    found: str


def level_of(checks: Sequence[Check]) -> Level:
    """The most severe level of the checks; OK if there are none."""
    return max((check.level for check in checks), key=LEVELS.index, default="OK")
