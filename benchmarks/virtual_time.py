"""An event loop in virtual time: when no task can run, time jumps to the next timer.

For programs that wait for timers alone, not for files, sockets or threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine


class _Jump(selectors.SelectSelector):
    """A selector that advances the time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the time by ``timeout`` seconds."""
        assert timeout is not None, "the loop waits for an event that never comes"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with the time of its selector."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jump.now


def run_virtually(main: Coroutine[object, object, None]) -> None:
    """Run ``main`` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
