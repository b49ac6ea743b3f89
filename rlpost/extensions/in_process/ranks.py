"""The trainer's only rank, in this process, behind the interface of a group of workers."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

from rlpost.driver.workers import Stored, WorkerGroup

T = TypeVar("T")


class InProcessWorker(WorkerGroup):
    """A group of one worker whose object lives here; a call runs in a thread, one at a time.

    It has the calls of a training step. What is for other processes (their death, logs, spans) is
    not there.
    """

    def __init__(self, rank: object) -> None:
        self._rank = rank
        self._calling = asyncio.Lock()

    def __len__(self) -> int:
        return 1

    async def call(self, method: str, *arguments: object) -> list[Any]:
        return await self.call_each(method, [arguments])

    async def call_each(
        self, method: str, arguments: Sequence[Sequence[object]], **keywords: object
    ) -> list[Any]:
        (own,) = arguments
        values = [each.reference if isinstance(each, Stored) else each for each in own]
        called = operator.attrgetter(method)(self._rank)
        if not callable(called):
            return [called]
        async with self._calling:
            return [await asyncio.to_thread(called, *values, **keywords)]

    async def call_each_stored(
        self, method: str, arguments: Sequence[Sequence[object]]
    ) -> list[Stored[Any] | None]:
        (value,) = await self.call_each(method, arguments)
        return [Stored(value) if value else None]

    async def put(self, value: T) -> Stored[T]:
        return Stored(value)

    async def get(self, stored: Stored[T]) -> T:
        return stored.reference
