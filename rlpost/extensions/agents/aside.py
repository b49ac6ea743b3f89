"""Keep the work of long requests out of event loops.

Parsing, rendering and comparing are Python, which holds the interpreter's lock: each further thread
that does so delays the loop by tens of milliseconds. So threads take turns; a thread gives its turn
away while the tokenizer runs, which needs no lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

SMALL_BYTES = 4 << 10
"""Work on texts of this size stays in the loop: it takes about 1 ms, a thread no less."""
_turn = threading.Lock()
_thread = threading.local()


async def run_aside(work: Callable[[], T], *, num_bytes: int) -> T:
    """Run ``work``, in a thread unless it is small. When cancelled, waits until it has ended."""
    if num_bytes <= SMALL_BYTES:
        return work()
    ending = asyncio.get_running_loop().run_in_executor(None, _run_in_turn, work)
    cancelled: asyncio.CancelledError | None = None
    try:
        while not ending.done():
            try:
                await asyncio.wait([ending])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            ending.exception()  # retrieved, so that it is not logged
            raise cancelled
        return ending.result()
    finally:
        # An error refers to this frame by its traceback: in a cycle, both would keep the request.
        del ending, cancelled


def _run_in_turn(work: Callable[[], T]) -> T:
    with _turn:
        _thread.has_turn = True
        try:
            return work()
        finally:
            _thread.has_turn = False


@contextmanager
def without_turn() -> Iterator[None]:
    """Let other threads of ``run_aside`` take their turn; for calls that free the interpreter."""
    if not getattr(_thread, "has_turn", False):
        yield
        return
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()
