"""Watchdog of the event loop: measures how late callbacks run, and logs where the loop stalls.

Input: the running loop. Output: the longest lateness since the last query, for
``driver/loop_lag_s``; for a stall of more than ``stall_s`` seconds the stack of the loop's thread,
in the log.

While a callback runs, the driver notices no stop request, dead engine or heartbeat. The loop
records how late it runs a callback that is due every ``tick_s`` seconds. A thread reads that
record, because a blocked loop cannot report its own stall. A call into C that keeps the
interpreter's lock blocks the thread as well; it then logs the place to which the call returned.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback

from common.log_format import DIAGNOSTICS

logger = logging.getLogger(__name__)

TICK_S = 0.02
STALL_S = 1.0
QUIET_S = 60.0
"""At most one stack is logged in this time: a stack is long, and stalls often repeat."""
LONGEST_STACK = 20  # innermost calls that are logged


class LoopLag:
    """Watches the loop that enters it; an asynchronous context manager."""

    def __init__(
        self, *, tick_s: float = TICK_S, stall_s: float = STALL_S, quiet_s: float = QUIET_S
    ) -> None:
        """
        Args:
            tick_s: seconds between measured callbacks; shorter delays may be missed.
            stall_s: lateness from which the stack is logged, once a stall.
            quiet_s: least time between two logged stacks.
        """
        self._tick_s, self._stall_s, self._quiet_s = tick_s, stall_s, quiet_s
        self._due = 0.0  # when the next callback should run; read by the watching thread
        self._longest_s = 0.0
        self._num_unreported = 0
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LoopLag:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._schedule()
        self._watcher = threading.Thread(target=self._watch, name="loop lag", daemon=True)
        self._watcher.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def take(self) -> float:
        """Return the longest lateness in seconds since the last call; call it from the loop."""
        now = time.monotonic()
        longest_s = max(self._longest_s, now - self._due)
        self._longest_s = 0.0
        self._due = max(self._due, now)  # lateness that has been returned does not count again
        return longest_s

    def _schedule(self) -> None:
        self._due = time.monotonic() + self._tick_s
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._longest_s = max(self._longest_s, time.monotonic() - self._due)
        self._schedule()

    def _watch(self) -> None:
        reported_due = quiet_until = 0.0
        while not self._ended.wait(self._stall_s / 4):
            due, now = self._due, time.monotonic()
            is_stalled = now - due > self._stall_s
            if not is_stalled or due == reported_due:
                continue
            reported_due = due
            if now < quiet_until:
                self._num_unreported += 1
                continue
            quiet_until = now + self._quiet_s
            self._report(now - due)

    def _report(self, late_s: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = traceback.format_stack(frame)[-LONGEST_STACK:] if frame is not None else []
        more = ""
        if self._num_unreported:
            more = f"; {self._num_unreported} earlier stalls were not logged"
        self._num_unreported = 0
        logger.info(
            "%sthe event loop has been blocked for %.1f s%s; it is in:\n%s",
            DIAGNOSTICS,
            late_s,
            more,
            "".join(stack),
        )
