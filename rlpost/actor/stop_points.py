"""Where a pass over micro-batches can be left: the same place on every rank, without a collective.

In: two calls from a second thread of the worker, while the first computes. Out: ``Interrupted`` on the first thread, at
a boundary that all ranks share. The driver asks every rank to ``hold``: it says which boundary it comes to next and
waits there. The driver then knows how far the farthest has come, and lets all go on to that one place (``release``),
where each raises. A rank that is at a boundary has finished all collectives of the micro-batches before it and begun
none of the next, so nobody is left waiting in one; that is why the place must be the same.

Passes are counted: every rank makes the same ones in the same order. A stop point is (number of the pass, index of
the micro-batch that would come next). With pipeline stages a pass is one unit, for micro-batches of several stages
overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlpost.errors import Interrupted, TrainingError

HOLD_DEADLINE_S = 120.0
"""A held rank waits so long for the driver's decision, which needs an answer from every rank."""


@dataclass(frozen=True, slots=True, order=True)
class StopPoint:
    """The boundary before micro-batch ``index`` of pass ``number``; ``length`` boundaries in the pass, 0 where it has
    not begun."""

    number: int
    index: int
    length: int = 0


def common_stop_point(held: Sequence[StopPoint]) -> StopPoint:
    """Where all ranks stop, from where each is held: the first boundary that none has passed and all will come to.

    Micro-batches of the ranks are equally many as a rule; where they are not, or where a rank has not begun the pass
    that another is in, the place is the end of that pass.

    >>> common_stop_point([StopPoint(7, 1, 4), StopPoint(7, 2, 4)])
    StopPoint(number=7, index=2, length=0)
    >>> common_stop_point([StopPoint(7, 3, 4), StopPoint(8, 0)])
    StopPoint(number=8, index=0, length=0)
    """
    farthest = max(held)
    all_come = farthest.index == 0 or all(one.number == farthest.number and farthest.index < one.length for one in held)
    return StopPoint(farthest.number, farthest.index) if all_come else StopPoint(farthest.number + 1, 0)


class StopPoints:
    """Of one rank. ``passing`` and ``cross`` are for the thread that computes, the others for the second."""

    def __init__(self, *, deadline_s: float = HOLD_DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._next = StopPoint(0, 0)
        self._is_held = False
        self._stop_at: StopPoint | None = None

    @contextmanager
    def passing(self, length: int) -> Iterator[None]:
        """A pass of ``length`` boundaries takes place within."""
        self._go_to(StopPoint(self._next.number, 0, length))
        try:
            yield
        finally:
            self._go_to(StopPoint(self._next.number + 1, 0))

    def cross(self, index: int) -> None:
        """Called before anything of micro-batch ``index`` is touched.

        Raises:
            Interrupted: this is where all ranks stop.
            TrainingError: held, and nobody said for how long.
        """
        with self._changed:
            if self._is_held and not self._changed.wait_for(lambda: not self._is_held, self._deadline_s):
                raise TrainingError(
                    f"held at a micro-batch for {self._deadline_s:.0f} s; the driver did not say how to go on, because "
                    "it, or another rank, does not answer"
                )
            if self._stop_at is not None and (self._next.number, index) >= (self._stop_at.number, self._stop_at.index):
                raise Interrupted("a stop was requested between two micro-batches")
            self._next = StopPoint(self._next.number, index + 1, self._next.length)

    def hold(self) -> StopPoint:
        """Wait at the next boundary from now on; returns which that is."""
        with self._changed:
            self._is_held = True
            return self._next

    def release(self, stop_at: StopPoint | None) -> None:
        """Go on, to ``stop_at`` or for good."""
        with self._changed:
            self._is_held, self._stop_at = False, stop_at
            self._changed.notify_all()

    def _go_to(self, place: StopPoint) -> None:
        with self._changed:
            self._next = place
