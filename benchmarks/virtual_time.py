"""An event loop whose time passes only while nothing can run: hours of waiting take no time.

For programs that wait for timers alone, not for files, sockets or threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine


class _Jump(selectors.SelectSelector):
    """Nothing to wait for: time passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let ``timeout`` seconds pass."""
        assert timeout is not None, "the loop waits for what never comes"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes only while nothing can run."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jump.now


def run_virtually(main: Coroutine[object, object, None]) -> None:
    """Run ``main`` and end what it started."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
