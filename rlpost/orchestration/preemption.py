"""The one request to stop: a file in the attempt's folder.

Whoever learns first that the run must end soon writes it (the batch script at USR2, an agent at TERM). Every phase of
the loop polls it here; a poll costs one ``stat``.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlpost.errors import Preempted


class StopRequest:
    """Reads the stop file; never writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def requested(self) -> bool:
        return self._path.exists()

    def check(self) -> None:
        """Raise Preempted, with the reason that the file gives, when a stop was requested."""
        if self.requested():
            raise Preempted(f"stop requested: {self._reason()}")

    def _reason(self) -> str:
        text = self._path.read_text().strip()
        try:
            return str(json.loads(text)["reason"])
        except (ValueError, KeyError, TypeError):
            return text or "no reason given"
