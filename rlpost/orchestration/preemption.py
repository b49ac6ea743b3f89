"""The one request to stop: a file in the attempt's folder; and what there is time to save before the end.

Whoever learns first that the run must end soon writes the file: the batch script at USR2, an agent at TERM or by its
own clock when no signal came, a local run at Ctrl-C. It holds a reason, the time of the signal and the deadline at
which the run is killed. Every phase of the loop polls it here, in a thread: storage that hangs costs a poll ANSWER_S
once, and then nothing.

The writer's clock is another host's. It is believed as far as it agrees with what this process saw itself: the file
appeared between the last poll that did not find it and the first that did.

What is saved is decided purely: a full checkpoint when it fits into the time that is left, else the journal alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from bootstrap.handoff import is_there
from rlpost.errors import HalfTrained, Preempted
from rlpost.files import started

logger = logging.getLogger(__name__)

T = TypeVar("T")
Saved = Literal["checkpoint", "journal"]

POLL_S = 0.2
EXIT_S = 15.0
"""From the last thing saved to a job that may be killed: the driver leaves, a verdict is written, the job requeued."""
BYTES_PER_S_A_NODE = 200e6
"""Write rate of a node before any was measured: low, for a journal alone costs less than a checkpoint cut off."""
CHECKPOINT_TO_WEIGHTS = 8.0
"""Bytes of a checkpoint for each byte of bf16 weights: weights, fp32 copy and two fp32 moments are 14 for 2."""
SLOWER_THAN_MEASURED, FIXED_S = 1.5, 5.0
ANSWER_S = 1.0
CLOCK_SLACK_S = 2.0
"""By which a poll may be late, or a clock be rounded, before the clock is taken for wrong."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the stop file says; times in seconds since 1970, None where the writer did not know."""

    reason: str
    time: float | None = None
    deadline: float | None = None


def parse_request(text: str) -> Request:
    """What is written in a stop file, by a program or by hand.

    >>> parse_request('{"reason": "USR2", "time": 100, "deadline": "N/A"}')
    Request(reason='USR2', time=100.0, deadline=None)
    """
    text = text.strip()
    try:
        raw = json.loads(text)
        return Request(str(raw["reason"]), _seconds(raw.get("time")), _seconds(raw.get("deadline")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Request(text or "no reason given")


def _seconds(value: Any) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def leave_with(time_left_s: float | None, save_s: float) -> Saved:
    """What to save when ``time_left_s`` is left until the run is killed and a full checkpoint takes ``save_s``.

    Without a known deadline there is time for everything.
    """
    fits = time_left_s is None or time_left_s >= save_s + EXIT_S
    return "checkpoint" if fits else "journal"


class SaveTimes:
    """How long a full checkpoint takes: from the slowest rate at which this run wrote one, or from its size alone."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._num_bytes = 0.0
        self._rate = BYTES_PER_S_A_NODE
        self._measured: list[float] = []

    def expect(self, weight_bytes: float, *, num_nodes: int) -> None:
        """Before the first checkpoint: what the weights weigh on disk, and how many nodes write."""
        self._num_bytes = CHECKPOINT_TO_WEIGHTS * weight_bytes
        self._rate = BYTES_PER_S_A_NODE * num_nodes

    def recall(self, committed: Iterable[Mapping[str, Any]]) -> None:
        """What earlier attempts wrote into the ledger."""
        for entry in committed:
            if entry.get("bytes") and entry.get("seconds"):
                self._learn(float(entry["bytes"]), float(entry["seconds"]))

    def begin(self) -> None:
        """A checkpoint is being written from now on."""
        self._began = self._clock()

    def committed(self, num_bytes: int) -> float | None:
        """It is committed; returns the seconds that it took, None when nobody said when it began."""
        if self._began is None:
            return None
        seconds, self._began = self._clock() - self._began, None
        self._learn(num_bytes, seconds)
        return seconds

    @property
    def estimate_s(self) -> float:
        """Seconds for the next one, rather too many than too few."""
        if not self._measured:
            return FIXED_S + self._num_bytes / self._rate
        return FIXED_S + SLOWER_THAN_MEASURED * self._num_bytes / min(self._measured)

    def _learn(self, num_bytes: float, seconds: float) -> None:
        self._num_bytes = num_bytes
        self._measured = [*self._measured[-4:], num_bytes / max(seconds, 1e-3)]


class StopRequest:
    """Reads the stop file; never writes it. Knows how long a save takes, and so what there is time for."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: seconds since 1970; ``monotonic``: seconds since any moment."""
        self._path = path
        self._clock, self._monotonic = clock, monotonic
        self._is_requested = False
        self._poll: Future[None] | None = None
        self._absent_at: float | None = None  # when the last poll began that did not find the file
        self._present_at: float | None = None  # when the first one ended that did
        self._request: Request | None = None
        self._look: asyncio.Task[None] | None = None
        self.saves = SaveTimes()
        self.left_with: Saved | None = None
        """What was decided to save, once the loop had to leave."""
        self.at_step: int | None = None
        """The step that the trainer had reached then."""

    def requested(self) -> bool:
        """Whether the run must end soon; latches once true. A file system that does not answer says nothing."""
        if not self._is_requested:
            is_hanging = self._poll is not None and not self._poll.done()
            if not is_hanging:
                self._poll = started(self._look_once)
                wait_for([self._poll], ANSWER_S)
        return self._is_requested

    def _look_once(self) -> None:
        began_at = self._monotonic()
        if is_there(self._path):
            self._present_at = self._monotonic()
            self._is_requested = True
        else:
            self._absent_at = began_at

    def check(self) -> None:
        """Raise Preempted, with the reason that the file gives, when a stop was requested."""
        if self.requested():
            raise Preempted(f"stop requested: {self._read().reason}")

    def time_left_s(self) -> float | None:
        """Seconds until the run is killed; None without a request, or without a known deadline."""
        if not self.requested():
            return None
        request = self._read()
        if request.deadline is None:
            return None
        if request.time is None:
            return request.deadline - self._clock()
        return request.deadline - request.time - self._since(request.time)

    def seconds_from_signal(self) -> float | None:
        """Since the signal; None without a request."""
        if not self.requested():
            return None
        written = self._read().time
        return 0.0 if written is None else max(0.0, self._since(written))

    def _since(self, written: float) -> float:
        """Seconds since a moment of the writer's clock, within what the polls of this process allow."""
        seconds = self._clock() - written
        if self._absent_at is None or self._present_at is None:
            return seconds  # the file was there from the beginning
        now = self._monotonic()
        longest = now - self._absent_at + CLOCK_SLACK_S
        return min(max(seconds, now - self._present_at - CLOCK_SLACK_S), longest)

    def is_nearly_over(self) -> bool:
        """Whether it is time to leave as things are."""
        left = self.time_left_s()
        return left is not None and left < EXIT_S

    def leave_with(self, request: Preempted) -> Saved:
        """What the loop is to save after ``request``: a full checkpoint, or, where that does not fit into the time left
        or the trainer is between two steps, the journal alone. The ledger tells what was answered here."""
        left, needed = self.time_left_s(), self.saves.estimate_s
        self.left_with = "journal" if isinstance(request, HalfTrained) else leave_with(left, needed)
        time_left = "no deadline is known" if left is None else f"{left:.0f} s are left"
        logger.warning("%s, a checkpoint takes about %.0f s: saving the %s", time_left, needed, self.left_with)
        return self.left_with

    async def unless_requested(self, work: Awaitable[T]) -> T:
        """The result of ``work``. Raises Preempted, and cancels it, as soon as a stop is requested."""
        task = asyncio.ensure_future(work)
        try:
            self.check()
            await asyncio.wait([task, self._looking()], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _looking(self) -> asyncio.Task[None]:
        """Done when a stop is requested. All who wait share it, so that many of them look no more often than one."""
        loop = asyncio.get_running_loop()
        if self._look is None or self._look.get_loop() is not loop or self._look.done():
            self._look = loop.create_task(self._until_requested())
        return self._look

    async def _until_requested(self) -> None:
        while not self.requested():
            await asyncio.sleep(POLL_S)

    def _read(self) -> Request:
        if self._request is None:
            try:
                text = self._path.read_text(errors="replace")
                request = parse_request(text)
                written = request.time
                if written is None and request.deadline is None:
                    written = self._path.stat().st_mtime  # for people
            except OSError as error:  # the next look may tell the deadline
                return Request(f"its reason cannot be read: {error}")
            request = Request(request.reason, written, request.deadline)
            if not text.strip():  # where there are no hard links a file is there before what it says
                return request
            self._request = request
        return self._request
