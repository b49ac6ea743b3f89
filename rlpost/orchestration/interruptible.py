"""Calls that make all actors pass over micro-batches, and what a stop request does to one that is under way.

In: the group of actors, the stop request. Out: the results of every rank; or ``Preempted`` when the call could be left
between two micro-batches, on all ranks at the same place, so that its step did not happen. The protocol is that of
``rlpost.actor.stop_points``: hold every rank, find the place, let all go on to it. Nothing is asked of anybody, and no
collective added, unless a stop is requested.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Protocol

from rlpost.actor.stop_points import HOLD_DEADLINE_S, common_stop_point
from rlpost.errors import HalfTrained, Interrupted, Preempted
from rlpost.orchestration.preemption import EXIT_S, POLL_S, StopRequest


class Actors(Protocol):
    """The group of actor workers."""

    async def call_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call ``method`` on every rank with its own arguments; results in order of rank."""

    async def call_aside(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` on every rank beside what it computes; results in order of rank."""


class InterruptibleCalls:
    """One call after the other."""

    def __init__(self, actors: Actors, stop: StopRequest) -> None:
        self._actors = actors
        self._stop = stop

    async def make(self, method: str, arguments: Sequence[Sequence[Any]], *, may_leave: bool) -> list[Any]:
        """Call ``method`` on every rank, each with its own arguments; results in order of rank.

        Args: ``may_leave``: whether what was before the call is a state that a resume can start from.

        Raises:
            Preempted: a stop was requested before or within the call; weights and optimizer are as before it.
            HalfTrained: the deadline came first, or a rank hangs; what the ranks hold is unknown, or of no step.
        """
        if may_leave:
            self._stop.check()
        work = asyncio.ensure_future(self._actors.call_each(method, arguments))
        left = not may_leave
        try:
            while not work.done():
                await asyncio.wait([work], timeout=POLL_S)
                if not work.done() and self._stop.requested():
                    if not left:
                        left = True
                        await self._leave()
                    elif self._stop.is_nearly_over():
                        raise HalfTrained(f"a stop was requested, and {method} does not end before the deadline")
            results = work.result()
        except Interrupted:
            raise Preempted(f"a stop was requested during {method}, which was left between two micro-batches") from None
        finally:
            work.cancel()
        if left and may_leave:  # it ended before the place to stop at, where the next pass would end
            await self._actors.call_aside("boundaries.release", None)
        return results

    async def _leave(self) -> None:
        """Let every rank end its pass at the first boundary that all of them come to. Raises HalfTrained."""
        left_s = self._stop.time_left_s()
        within_s = min(HOLD_DEADLINE_S / 2, math.inf if left_s is None else max(0.0, left_s - EXIT_S))
        try:
            async with asyncio.timeout(within_s):
                held = await self._actors.call_aside("boundaries.hold")
                await self._actors.call_aside("boundaries.release", common_stop_point(held))
        except TimeoutError:
            raise HalfTrained(
                f"a stop was requested, and actors did not answer within {within_s:.0f} s when asked to stop between "
                "micro-batches; their logs (attempts/K/actor-*.log) say who hangs"
            ) from None
