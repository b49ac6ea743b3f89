"""Python's garbage collector in the driver: full collections between steps, never while a rollout
starts.

A full collection passes over every container of the process: with 8,192 requests in flight half a
second, in which the event loop does nothing else. Python starts one whenever the number of
long-lived objects has grown by a quarter, so several while requests begin. Young garbage is
collected as ever, and reference counts free most objects without the collector.
"""

from __future__ import annotations

import gc

YOUNG, MIDDLE = 2_000, 10
"""Allocations between collections of the youngest generation, and such collections between those of
the second.
"""
NEVER = 1 << 30


def collect_between_steps_only() -> None:
    """Disable automatic full collections, and exempt all present objects from collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


def between_steps() -> None:
    """Run a full collection, in a process that called ``collect_between_steps_only``."""
    if gc.get_threshold()[2] == NEVER:
        gc.collect()
