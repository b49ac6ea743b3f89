"""Notes of ``rlpost submit`` while a run starts: what it waits for, and how long that usually takes.

Input: the newest record of the driver's log, and the time. Output: a line after every SILENT_S
seconds without another, until the first step. Pure.
"""

from __future__ import annotations

import re

SILENT_S = 10.0
_STEP = re.compile(r"\bstep \d+/\d+\b")
_LOADING = re.compile(r"\bstarting .*\branks?\b")


def awaited(has_attempt: bool, record: str) -> str:
    """Return what a run waits for; empty once it has trained a step.

    Args:
        has_attempt: whether the attempt has a folder.
        record: the newest record of the driver's log; empty without one.

    >>> awaited(True, "10:00:00 INFO starting 2 actor ranks and 2 engines")
    'trainer and engines to load (usually 20 s for a small model, minutes for a large one or where \
GPU kernels are compiled first)'
    """
    if not has_attempt:
        return "the run's process to start (usually 5 s)"
    if not record:
        return "Ray and the driver to start (usually 10 s, a minute on a busy machine)"
    if _STEP.search(record):
        return ""
    if _LOADING.search(record):
        return (
            "trainer and engines to load (usually 20 s for a small model, minutes for a large one "
            "or where GPU kernels are compiled first)"
        )
    return "the first step (generation takes most of its time; GPU kernels are compiled in it once)"


class StartupNotes:
    """Says when to print a note; times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._started = self._printed = now
        self._record = ""
        self._is_over = False

    def heard(self, record: str, now: float) -> None:
        """A record was printed."""
        self._record, self._printed = record, now
        self._is_over = self._is_over or _STEP.search(record) is not None

    def due(self, has_attempt: bool, now: float) -> str | None:
        """Return the line to print now; None while there is none."""
        if self._is_over or now - self._printed < SILENT_S:
            return None
        self._printed = now
        return f"... {now - self._started:.0f} s: waiting for {awaited(has_attempt, self._record)}"
