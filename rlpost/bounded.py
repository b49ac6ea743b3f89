"""Runs a coroutine for each of many items, with bounded concurrency.

A run has hundreds of engines. Querying all of them at once would open a socket for each and block
the event loop.
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
    """Return the results of ``act(item)`` in order, with at most ``at_most`` calls in progress.

    The first failure cancels the others and is raised.
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
