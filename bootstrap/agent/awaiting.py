"""Helpers to wait for several asyncio tasks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def all_or_first_error(*wanted: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return all results, or raise the first exception and cancel the other tasks."""
    tasks = [asyncio.create_task(one) for one in wanted]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def first_of(*awaited: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return when the first future is done, or after ``timeout_s`` seconds."""
    await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def look_at_error(task: asyncio.Task[None]) -> None:
    """Done-callback for a task whose exception is reported elsewhere; avoids asyncio's warning."""
    if not task.cancelled():
        task.exception()
