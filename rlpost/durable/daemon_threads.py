"""Daemon threads and deadlines for storage that may hang.

A daemon thread does not keep a process from exiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

from rlpost.errors import CheckpointError

T = TypeVar("T")


def start_in_daemon(act: Callable[[], T]) -> Future[T]:
    """Run ``act`` in a daemon thread; return a future of its result, which cannot be cancelled."""
    future: Future[T] = Future()
    # Otherwise a caller of ``in_daemon`` that is cancelled would cancel the future, and the thread
    # could not set its result.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = act()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future


async def in_daemon(act: Callable[[], T]) -> T:
    """Run ``act`` in a daemon thread and return its result."""
    return await asyncio.wrap_future(start_in_daemon(act))


@asynccontextmanager
async def within(deadline_s: float, problem: str) -> AsyncIterator[None]:
    """Raise CheckpointError with ``problem`` when the block exceeds ``deadline_s`` seconds."""
    deadline = asyncio.timeout(deadline_s)
    try:
        async with deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise  # a TimeoutError of the storage
        raise CheckpointError(problem) from None
