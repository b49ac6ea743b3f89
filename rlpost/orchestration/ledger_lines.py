"""Ledger entries of the driver, written off the event loop while it owns the run.

Input: events of an attempt. Output: lines of RUN/ledger.jsonl. A line that cannot be written is
retried with the next one: a failure to write the ledger never ends a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from common.ledger import Ledger
from rlpost.run_files import RunFile

logger = logging.getLogger(__name__)

LOST = "reports and the supervisor miss the event"


class RecordEvent(Protocol):
    """Writes an event with JSON values into the ledger."""

    def __call__(self, event: str, **details: object) -> None:
        """Write it soon."""


def not_recorded(event: str, **details: object) -> None:
    """Drop an event: a ``RecordEvent`` for a run without a ledger."""


class LedgerLines:
    """Writes the ledger entries of one attempt."""

    def __init__(self, ledger: Ledger, *, check: Callable[[], None]) -> None:
        """``check`` raises Fenced when the run belongs to another attempt."""
        self._ledger = ledger
        self._file = RunFile(ledger.path, lost=LOST, check=check)

    async def append(self, event: str, **details: object) -> bool:
        """Add a line; False when it is not on disk within the deadline. Raises Fenced."""
        return await self._file.do(partial(self._ledger.append, event, **details))

    def soon(self, event: str, **details: object) -> None:
        """Like ``append``, but return immediately."""
        self._file.soon(partial(self._ledger.append, event, **details))

    def finish(self, event: str, **details: object) -> bool:
        """Like ``append``, for the last line and without an event loop."""
        is_written = self._file.finish(partial(self._ledger.append, event, **details))
        if not is_written:
            logger.error("this event could not be written to the ledger: %s", event)
        return is_written

    def entries(self) -> list[dict[str, object]]:
        """Return all valid entries; damaged lines are logged. Raises OSError."""
        for problem in self._ledger.damage():
            logger.warning("%s: %s; it is left out", self._ledger.path, problem)
        return self._ledger.read()

    def close(self) -> None:
        """Retry failed writes once."""
        self._file.close()
