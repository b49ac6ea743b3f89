"""Calls in a thread of low priority, for preparations that must not slow down the running work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from rlpost.daemon_threads import started

T = TypeVar("T")

NICENESS = 15


def at_low_priority(act: Callable[[], T]) -> T:
    """Return the result of ``act``, run in a thread of low CPU priority. Blocks.

    The process keeps its priority for later work: an unprivileged process could not raise it again.
    """

    def run() -> T:
        # On Linux a priority belongs to a thread, and PRIO_PROCESS accepts a thread's id.
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(own, NICENESS))
        return act()

    return started(run).result()
