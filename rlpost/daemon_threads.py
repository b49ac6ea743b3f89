"""Calls in daemon threads, which do not keep a process from exiting when storage hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def started(act: Callable[[], T]) -> Future[T]:
    """Run ``act`` in a daemon thread; return a future of its result."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            result = act()
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return found


async def in_daemon(act: Callable[[], T]) -> T:
    """Run ``act`` in a daemon thread and return its result; hung storage does not block the
    exit.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not found.done():  # else the caller was cancelled
            found.set_exception(error) if error is not None else found.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result = error = None
        try:
            result = act()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await found
