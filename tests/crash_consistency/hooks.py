"""Hooks that disturb an attempt at one of its file operations."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.crash_consistency.interception import Attempt, Hook, Op
from tests.crash_consistency.virtual_time import REAL_THREAD, hang, hang_until
from tests.crash_consistency.world import World

PATIENCE_S = 120.0  # real seconds within which an attempt must reach its next pause


def any_change(op: Op) -> bool:
    """Match every changing operation."""
    return op.changes


@dataclass
class KillAt(Hook):
    """End the process before the n-th operation that ``matches``, counted from 0.

    ``torn``: if the operation is a write, end it halfway through.
    """

    number: int
    torn: bool = False
    matches: Callable[[Op], bool] = any_change
    seen: int = 0
    target: Op | None = None

    def before(self, attempt: Attempt, op: Op) -> None:
        """End the process."""
        if not self.matches(op):
            return
        self.seen += 1
        if self.seen == self.number + 1:
            if not (self.torn and op.kind == "write"):
                raise attempt.die()
            self.target = op

    def shorten(self, attempt: Attempt, op: Op, size: int) -> int:
        """Write half of the torn write."""
        return size // 2 if op is self.target else size

    def after(self, attempt: Attempt, op: Op) -> None:
        """End the process after the torn write."""
        if op is self.target:
            raise attempt.die()


@dataclass
class Lagging(Hook):
    """Run the journal's thread ``turns`` event loop iterations late, so that its queue fills."""

    turns: int

    def before(self, attempt: Attempt, op: Op) -> None:
        """Set the lag."""
        attempt.lag = self.turns


@dataclass
class FaultAt(Hook):
    """Make storage fail ``count`` times at operations that ``matches``, starting with the n-th.

    ``error`` is the name of an errno; "short": a write accepts half of its bytes; "hang": the
    operation never returns.
    """

    number: int
    error: str
    count: float = 1
    matches: Callable[[Op], bool] = lambda op: True
    seen: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    hit: list[Op] = field(default_factory=list)

    def before(self, attempt: Attempt, op: Op) -> None:
        """Fail or hang if it is the operation's turn."""
        if not self.matches(op):
            return
        self.seen += 1
        if not self.number < self.seen <= self.number + self.count:
            return
        self.hit.append(op)
        if self.error == "hang":
            hang(attempt, self.released)
        if self.error != "short":
            code = getattr(errno, self.error)
            raise OSError(code, os.strerror(code), op.path)

    @property
    def may_hang(self) -> bool:  # type: ignore[override]
        """Whether an operation may never return."""
        return self.error == "hang"

    def over(self) -> None:
        """Release hanging threads, because they end with the process."""
        self.released.set()

    def shorten(self, attempt: Attempt, op: Op, size: int) -> int:
        """Accept half of a short write."""
        is_hit = self.error == "short" and bool(self.hit) and self.hit[-1] == op and size > 1
        return size // 2 if is_hit else size


@dataclass
class FaultFor(Hook):
    """Make operations that ``matches`` fail for ``seconds``.

    The time begins at the first of them after ``number`` operations that ``counted``. ``error`` is
    the name of an errno; "hang": operations return only when the time is over.
    """

    number: int
    error: str
    seconds: float
    matches: Callable[[Op], bool] = any_change
    counted: Callable[[Op], bool] = any_change
    seen: int = 0
    until: float | None = None  # on the attempt's clock

    def before(self, attempt: Attempt, op: Op) -> None:
        """Fail or hang within the time."""
        self.seen += self.counted(op)
        if not self.matches(op) or self.seen <= self.number:
            return
        if self.until is None:
            self.until = attempt.clock + self.seconds
        if attempt.clock >= self.until:
            return
        if self.error == "hang":
            hang_until(attempt, self.until)
        else:
            code = getattr(errno, self.error)
            raise OSError(code, os.strerror(code), op.path)

    @property
    def may_hang(self) -> bool:  # type: ignore[override]
        """Whether an operation may return late."""
        return self.error == "hang"


@dataclass
class KillAfter(Hook):
    """End the process before the n-th changing operation after all ``faults`` are over."""

    number: int
    faults: Sequence[Hook]
    seen: int = 0

    def before(self, attempt: Attempt, op: Op) -> None:
        """End the process."""
        faults = [each for each in self.faults if isinstance(each, FaultFor)]
        if op.changes and all(each.until and attempt.clock >= each.until for each in faults):
            self.seen += 1
            if self.seen > self.number:
                raise attempt.die()


@dataclass
class JumpAt(Hook):
    """Advance the clock at the n-th changing operation, as for a process that was paused."""

    number: int
    seconds: float

    def before(self, attempt: Attempt, op: Op) -> None:
        """Advance it once."""
        if op.changes and op.number == self.number:
            attempt.clock += self.seconds


@dataclass
class StopAt(Hook):
    """Request a stop before the n-th changing operation.

    ``deadline`` is that of the stop file: "N/A", or a time in the past.
    """

    world: World
    number: int
    deadline: str | int

    def before(self, attempt: Attempt, op: Op) -> None:
        """Write the stop file."""
        if op.changes and op.number == self.number:
            path = self.world.stop_file(attempt)  # type: ignore[arg-type]
            self.world.disk.put(
                path, json.dumps({"reason": "simulated", "deadline": self.deadline}).encode()
            )


class Paused(Hook):
    """An attempt in a thread that pauses before or after an operation until it is resumed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rests, self._goes = threading.Semaphore(0), threading.Semaphore(0)
        self._left = 0  # matching operations until the pause
        self._when = "before"
        self._matches: Callable[[Op], bool] = any_change
        self.attempt = world.prepare([self])
        self._thread = REAL_THREAD(target=self._drive, daemon=True)
        self.is_over = False

    def run_until(
        self, number: int | None, when: str = "before", matches: Callable[[Op], bool] = any_change
    ) -> None:
        """Run to the n-th operation from here that ``matches``, counted from 0, or to the end.

        ``number`` None: to the end.
        """
        assert not self.is_over
        self._left, self._when, self._matches = -1 if number is None else number + 1, when, matches
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._goes.release()
        assert self._rests.acquire(timeout=PATIENCE_S), (
            "the attempt reached neither its pause nor its end"
        )

    def before(self, attempt: Attempt, op: Op) -> None:
        """Stop there."""
        self._at(op, "before")

    def after(self, attempt: Attempt, op: Op) -> None:
        """Stop there."""
        self._at(op, "after")

    def _at(self, op: Op, when: str) -> None:
        if when != self._when or not self._matches(op):
            return
        self._left -= 1
        if self._left == 0:
            self._rests.release()
            assert self._goes.acquire(timeout=PATIENCE_S), (
                "the paused attempt was not resumed in time"
            )

    def _drive(self) -> None:
        try:
            self._world.drive(self.attempt)
        finally:
            self.is_over = True
            self._rests.release()
