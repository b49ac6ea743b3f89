"""Notes of a command that follows a run: what a start waits for, and how long that usually takes.

Input: the newest record of the driver's log, and the time. Output: a line after every SILENT_S
seconds without another, until the first step. Pure.
"""

from __future__ import annotations

import re

from rlpost.cli.waiting_notes import SILENT_S, note

QUEUE_S = 600.0
"""Longest time between two notes of a job in the queue, which may wait for days."""
_STEP = re.compile(r"\bstep \d+/\d+\b")
_LOADING = re.compile(r"\bstarting\b")


def awaited(has_attempt: bool, record: str, *, is_local: bool = True) -> str:
    """Return what a run waits for; empty once it has trained a step.

    Args:
        has_attempt: whether the attempt has a folder.
        record: the newest record of the driver's log; empty without one.
        is_local: whether it runs on this machine, without Slurm.

    >>> awaited(True, "10:00:00 INFO starting 2 actor ranks and 2 engines")
    'trainer and engines to load (usually 20 s for a small model, minutes for a large one or where \
GPU kernels are compiled first)'
    """
    if not has_attempt:
        if is_local:
            return "the run's process to start (usually 5 s)"
        return "Slurm to start the job (as long as the queue is; rlpost status shows its reason)"
    if not record:
        if is_local:
            return "Ray and the driver to start (usually 10 s, a minute on a busy machine)"
        return "image, nodes and Ray (usually a minute, minutes for the first import of an image)"
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

    def __init__(self, now: float, *, is_local: bool = True) -> None:
        self._started = self._printed = now
        self._is_local = is_local
        self._record = ""
        self._is_over = False

    def heard(self, record: str, now: float) -> None:
        self._record, self._printed = record, now
        self._is_over = self._is_over or _STEP.search(record) is not None

    def due(self, has_attempt: bool, now: float) -> str | None:
        """Return the line to print now; None while there is none.

        In the queue each pause is as long as all that was waited before, up to QUEUE_S.
        """
        pause_s = SILENT_S
        if not has_attempt and not self._is_local:
            pause_s = min(QUEUE_S, max(SILENT_S, self._printed - self._started))
        if self._is_over or now - self._printed < pause_s:
            return None
        self._printed = now
        return note(
            now - self._started, awaited(has_attempt, self._record, is_local=self._is_local)
        )
