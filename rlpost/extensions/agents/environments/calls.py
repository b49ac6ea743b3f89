"""Calls of an environment's methods, asynchronous or not, and their cancellation.

A method that is not asynchronous runs in a daemon thread: it neither stalls the event loop nor
keeps the process from exiting.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from common.bounded import await_unless
from rlpost.durable.daemon_threads import in_daemon
from rlpost.engines.connection import Connection, Halted

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_S = 30.0  # deadline for an environment to release its resources
POLL_S = 0.5  # interval of checks for a halt; requests to the engines end without it


async def call(method: Callable[..., Awaitable[T] | T], *args: object) -> T:
    """Call a method, and await its result if it is awaitable."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    result = await in_daemon(partial(method, *args))
    return await result if inspect.isawaitable(result) else result


async def call_if_there(thing: object, name: str, *args: object, default: object = None) -> object:
    """Call a method that an environment may lack; return ``default`` without one."""
    method = getattr(thing, name, None)
    return default if method is None else await call(method, *args)


async def close(thing: object, word: str) -> None:
    """Call ``close`` of an environment, if it has one, within CLOSE_S.

    A failure is only logged: the episode has its result, and the next one has another environment.
    """
    try:
        async with asyncio.timeout(CLOSE_S):
            await call_if_there(thing, "close")
    except Exception as error:  # an environment's code
        why = f"more than {CLOSE_S:g} s" if isinstance(error, TimeoutError) else repr(error)
        logger.warning("--env %s: close failed: %s", word, why)


async def unless_halted(connection: Connection, work: Awaitable[T]) -> T:
    """Return the result of ``work``; cancel it and raise Halted once generation is halted."""

    async def raise_when_halted() -> None:
        while not connection.halted:
            await asyncio.sleep(POLL_S)
        raise Halted

    return await await_unless(work, raise_when_halted())
