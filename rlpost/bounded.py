"""Await one thing for each of many items, at most so many at a time.

A run has hundreds of engines. Asking all of them at the same moment opens a socket for each, in the one event loop
that everything else waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
T = TypeVar("T")

MAX_AT_ONCE = 64


async def for_each(
    act: Callable[[Item], Awaitable[T]], items: Iterable[Item], *, at_most: int = MAX_AT_ONCE
) -> list[T]:
    """Return the results of ``act(item)`` in order, with ``at_most`` of them in progress.

    The first failure is raised and ends the others.
    """
    capacity = asyncio.Semaphore(at_most)

    async def bounded(item: Item) -> T:
        async with capacity:
            return await act(item)

    tasks = [asyncio.ensure_future(bounded(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
