"""Calls to the ranks that train: what is around each of them, as one list, outermost first.

    1. ``repeat``          repeats an operation when ranks that died in it have been restarted
    2. ``LeaveOnStop``     leaves a call between two micro-batches when a stop is requested
    3. ``EndWhenHanging``  ends a call in which no rank moves
    4. ``ActorGroup``      sends the call to every rank

1 is around an operation of the loop (all calls of a rollout, a weight update, a save), the others
are around each call that passes over micro-batches. The order is what makes recovery correct:

- 1 is outside of 2 to 4. New ranks have the weights from before the operation, not from before the
  call: a call alone would be repeated on weights that lack the steps before it. ``Hang``, errors of
  4 and the loss of a node (``LostNodes.unless_ranks_lost``, directly inside of 1) therefore end the
  whole operation. ``Preempted`` passes through 1: ranks that have left a call have not died.
- 2 is outside of 3. Held ranks wait for the driver and do not move, as in a hang, so 3 stops
  watching at a stop request and 2 continues until the deadline of the request. Inside of 3, the
  messages that hold and release ranks would end with the call, and a rank that is held without a
  release fails. 3 adds whole calls to its history only: ``Interrupted`` passes through it.
- 4 is inside of all. It submits a call to every rank even if the wait for it is cancelled, so all
  ranks receive the same calls in the same order, whichever of 1 to 3 ends the wait. Otherwise some
  ranks would wait in collectives of a call that others have not received.

1 to 3 end a wait by ``common.bounded.await_unless``: of two that finish in one turn of the event
loop the call counts. A step that is done is not trained again because a stop request, a lost node
or a hang was noticed at its end; the next call notices them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from common.bounded import await_unless, cancel_all
from rlpost.driver.hang_report import ANSWER_S, HangReport, Overdue
from rlpost.driver.preemption import EXIT_S, POLL_S, StopRequest
from rlpost.driver.worker_groups import Actor, ActorGroup, remote
from rlpost.errors import Fenced, HalfTrained, Interrupted, Preempted, RlpostError
from rlpost.observe.progress.overdue import (
    CallHistory,
    OverdueRule,
    between_examinations_s,
    hangs,
    is_valid,
    limit_s,
)
from rlpost.observe.progress.position import Position
from rlpost.trainer.stop_points import HOLD_DEADLINE_S, common_stop_point

logger = logging.getLogger(__name__)

T = TypeVar("T")
Send = Callable[[], Awaitable[T]]


async def repeat(operation: Send[T], *, recover: Callable[[RlpostError], Awaitable[bool]]) -> T:
    """Return the result of ``operation``; repeat it as often as ``recover(error)`` is true.

    ``operation`` must be repeatable from the state that ``recover`` restores. Raises its error
    otherwise, and that of a recovery that fails.
    """
    while True:
        try:
            return await operation()
        except (Preempted, Fenced):
            raise
        except RlpostError as error:
            if not await recover(error):
                raise


@dataclass(frozen=True, slots=True)
class Call:
    """A call of all ranks: its name in errors, and whether a stop request may end it.

    ``may_leave``: a resume can start from the state before the call.
    """

    name: str
    may_leave: bool


class LeaveOnStop:
    """Makes all ranks leave a call between the same two micro-batches on a stop request.

    ``rlpost.trainer.stop_points`` defines the protocol: hold every rank, determine the stop point,
    let all ranks run to it. Without a stop request no message is sent and no collective is added.
    """

    def __init__(self, ranks: ActorGroup, stop: StopRequest) -> None:
        self._ranks = ranks
        self._stop = stop

    async def over(self, call: Call, send: Send[T]) -> T:
        """Await ``send()``.

        Raises:
            Preempted: a stop was requested before or within the call; weights and optimizer are
                unchanged.
            HalfTrained: the deadline passed, or a rank hangs; the state of the ranks is unknown or
                matches no completed step.
        """
        if call.may_leave:
            self._stop.check()
        work = asyncio.ensure_future(send())
        try:
            await self._stop.wait(work)
            is_leaving = call.may_leave and not work.done()
            if is_leaving:  # to the end, even if the call ends: a late message reaches the next one
                await self._leave()
            result = await await_unless(work, self._raise_when_nearly_over(call))
        except Interrupted:
            raise Preempted(
                f"a stop was requested during {call.name}, which was left between two micro-batches"
            ) from None
        finally:
            await cancel_all([work])
        if is_leaving:  # the call ended first; the stop point must not end the next one
            await self._ranks.aside(remote(Actor.stop_points.release, None))
        return result

    async def _raise_when_nearly_over(self, call: Call) -> None:
        while not self._stop.is_nearly_over():
            await asyncio.sleep(POLL_S)
        raise HalfTrained(f"a stop was requested, and {call.name} does not end before the deadline")

    async def _leave(self) -> None:
        """Make all ranks leave the call at their first common stop point. Raises HalfTrained."""
        left_s = self._stop.time_left_s()
        within_s = min(
            HOLD_DEADLINE_S / 2, math.inf if left_s is None else max(0.0, left_s - EXIT_S)
        )
        try:
            async with asyncio.timeout(within_s):
                held = await self._ranks.aside(remote(Actor.stop_points.hold))
                release = remote(Actor.stop_points.release, common_stop_point(held))
                await self._ranks.aside(release)
        except TimeoutError:
            raise HalfTrained(
                f"a stop was requested, and actors did not answer within {within_s:.0f} s when asked to stop between "
                "micro-batches; their logs (attempts/K/actor-*.log) show which rank hangs"
            ) from None


class EndWhenHanging:
    """Ends a call in which no rank moves, and names the ranks to blame.

    The decisions are pure: ``rlpost.observe.progress.overdue`` decides when a call hangs. After a
    stop request nothing is ended: held ranks do not move, and the request has its own deadline.
    """

    def __init__(
        self,
        ranks: ActorGroup,
        rule: OverdueRule,
        report: HangReport,
        *,
        is_stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks, self._rule, self._report = ranks, rule, report
        self._is_stopping, self._clock = is_stopping, clock
        self._histories: dict[str, CallHistory] = {}

    async def over(self, call: Call, send: Send[T]) -> T:
        """Await ``send()``. Raises Hang if no rank moves and the call has exceeded its limit."""
        history = self._histories.setdefault(call.name, CallHistory())
        limit, began = limit_s(history, self._rule), self._clock()
        if limit is None:
            result = await send()
        else:
            try:
                result = await await_unless(
                    send(), self._raise_when_hanging(call, history.longest, limit, began)
                )
            except Overdue as overdue:
                raise await self._report.write(overdue, self._rule, self._ranks) from None
        history.add(self._clock() - began)
        return result

    async def _raise_when_hanging(
        self, call: Call, longest_s: float, limit: float, began: float
    ) -> None:
        """Raise Overdue once the call hangs; return when a stop is requested."""
        before: list[Position | None] | None = None
        while True:
            due = self._clock() + between_examinations_s(limit)
            await asyncio.sleep(due - self._clock())
            if self._is_stopping():
                return
            if not is_valid(due, self._clock()):
                before = None  # this process was suspended, and so may the ranks have been
            now = await self._ranks.answers(remote(Actor.position), within_s=ANSWER_S)
            if self._is_stopping():
                return
            elapsed = self._clock() - began
            if hangs(elapsed, limit, before, now):
                raise Overdue(call.name, elapsed, longest_s, now)
            if elapsed >= limit:
                logger.warning(
                    "%s runs for %.0f s, the longest of the last took %.1f s, but ranks move",
                    *(call.name, elapsed, longest_s),
                )
            before = now


class Calls:
    """Makes calls of one group of ranks in all of their wrappers, one call at a time."""

    def __init__(
        self, ranks: ActorGroup, stop: StopRequest, hangs: EndWhenHanging | None = None
    ) -> None:
        """``hangs`` None: calls that hang are not ended."""
        self._wrappers: list[LeaveOnStop | EndWhenHanging] = [LeaveOnStop(ranks, stop)]
        if hangs is not None:
            self._wrappers.append(hangs)

    async def make(self, name: str, send: Send[T], *, may_leave: bool) -> T:
        """Return the result of ``send()``, the call ``name`` of all ranks; see ``Call``."""
        call = Call(name, may_leave)
        for wrapper in reversed(self._wrappers):
            send = partial(wrapper.over, call, send)
        return await send()
