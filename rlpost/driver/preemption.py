"""Preemption: the stop file of an attempt, and the choice of what to save in the time left.

Every phase of the loop polls the file in a thread. If the storage hangs, one poll waits ANSWER_S
and later polls return at once.

The writer's clock belongs to another host. Its time is clamped to what this process observed: the
file appeared between the last poll that did not find it and the first that did.

A pure function decides what to save: a full checkpoint when it fits into the time left, else the
journal alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, Literal, TypeVar

from common.bounded import await_unless
from common.files import is_there
from common.stop_file import StopMessage, parse_stop
from rlpost.durable.daemon_threads import start_in_daemon
from rlpost.errors import HalfTrained, Preempted

logger = logging.getLogger(__name__)

T = TypeVar("T")
Saved = Literal["checkpoint", "journal"]

POLL_S = 0.2
EXIT_S = 15.0
"""Seconds needed after the last save: the driver exits, the verdict is written, the job is
requeued.
"""
BYTES_PER_S_A_NODE = 200e6
"""Write rate of a node before any is measured. Low: an unfinished checkpoint costs more than none.
"""
CHECKPOINT_TO_WEIGHTS = 8.0
"""Bytes of a checkpoint per byte of bf16 weights: bf16 weights, fp32 copy and two fp32 moments are
14 for 2.
"""
SLOWER_THAN_MEASURED, FIXED_S = 1.5, 5.0
ANSWER_S = 1.0
CLOCK_SLACK_S = 2.0
"""Tolerance in seconds for late polls and rounded times before the writer's clock is clamped."""


def leave_with(time_left_s: float | None, save_s: float) -> Saved:
    """Decide what to save in the time left, if a checkpoint takes ``save_s`` seconds.

    ``time_left_s`` None is an unknown deadline: a checkpoint always fits.
    """
    fits = time_left_s is None or time_left_s >= save_s + EXIT_S
    return "checkpoint" if fits else "journal"


class SaveEstimate:
    """Estimates the duration of a checkpoint from the slowest measured rate, or from its size."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._num_bytes = 0.0
        self._rate = BYTES_PER_S_A_NODE
        self._measured: list[float] = []

    def expect(self, weight_bytes: float, *, num_nodes: int) -> None:
        """Set the size of the weights on disk in bytes and the number of nodes that write."""
        self._num_bytes = CHECKPOINT_TO_WEIGHTS * weight_bytes
        self._rate = BYTES_PER_S_A_NODE * num_nodes

    def recall(self, committed: Iterable[Mapping[str, Any]]) -> None:
        """Learn from the ``committed`` entries of earlier attempts in the ledger."""
        for entry in committed:
            if entry.get("bytes") and entry.get("seconds"):
                self._learn(float(entry["bytes"]), float(entry["seconds"]))

    def begin(self) -> None:
        """Record that a checkpoint begins to be written."""
        self._began = self._clock()

    def record_commit(self, num_bytes: int) -> float | None:
        """Record the commit of a checkpoint; return its seconds, None without ``begin``."""
        if self._began is None:
            return None
        seconds, self._began = self._clock() - self._began, None
        self._learn(num_bytes, seconds)
        return seconds

    @property
    def estimate_s(self) -> float:
        """Seconds for the next checkpoint; a conservative estimate."""
        if not self._measured:
            return FIXED_S + self._num_bytes / self._rate
        return FIXED_S + SLOWER_THAN_MEASURED * self._num_bytes / min(self._measured)

    def _learn(self, num_bytes: float, seconds: float) -> None:
        self._num_bytes = num_bytes
        self._measured = [*self._measured[-4:], num_bytes / max(seconds, 1e-3)]


class StopRequest:
    """Reads the stop file, and decides what to save in the time left. Never writes the file."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: seconds since 1970; ``monotonic``: seconds since an arbitrary moment."""
        self._path = path
        self._clock, self._monotonic = clock, monotonic
        self._is_requested = False
        self._poll: Future[None] | None = None
        self._absent_at: float | None = None  # start of the last poll that did not find the file
        self._present_at: float | None = None  # end of the first poll that did
        self._message: StopMessage | None = None
        self._poll_task: asyncio.Task[None] | None = None
        self.saves = SaveEstimate()
        self.left_with: Saved | None = None
        """The decision on what to save, once the loop has to stop."""
        self.at_step: int | None = None
        """The step that the trainer had reached at that moment."""

    def requested(self) -> bool:
        """Whether the run must end soon; latches once true. Hung storage changes nothing."""
        if not self._is_requested:
            is_hanging = self._poll is not None and not self._poll.done()
            if not is_hanging:
                self._poll = start_in_daemon(self._poll_once)
                wait_for([self._poll], ANSWER_S)
        return self._is_requested

    def _poll_once(self) -> None:
        began_at = self._monotonic()
        if is_there(self._path):
            self._present_at = self._monotonic()
            self._is_requested = True
        else:
            self._absent_at = began_at

    def check(self) -> None:
        """Raise Preempted with the reason in the file when a stop is requested."""
        if self.requested():
            raise Preempted(f"stop requested: {self._read().reason}")

    def time_left_s(self) -> float | None:
        """Seconds until the run is killed; None without a request or without a known deadline."""
        if not self.requested():
            return None
        message = self._read()
        if message.deadline is None:
            return None
        if message.time is None:
            return message.deadline - self._clock()
        return message.deadline - message.time - self._since(message.time)

    def seconds_from_signal(self) -> float | None:
        """Seconds since the signal; None without a request."""
        if not self.requested():
            return None
        written = self._read().time
        return 0.0 if written is None else max(0.0, self._since(written))

    def _since(self, written: float) -> float:
        """Seconds since ``written`` on the writer's clock, within what this process observed."""
        seconds = self._clock() - written
        if self._absent_at is None or self._present_at is None:
            return seconds  # the first poll found the file: no bounds
        now = self._monotonic()
        longest = now - self._absent_at + CLOCK_SLACK_S
        return min(max(seconds, now - self._present_at - CLOCK_SLACK_S), longest)

    def is_nearly_over(self) -> bool:
        """Whether less time is left than the exit itself needs."""
        left = self.time_left_s()
        return left is not None and left < EXIT_S

    def time_to_save_s(self) -> float | None:
        """Seconds left without those of the exit; None without a known deadline."""
        left = self.time_left_s()
        return None if left is None else max(0.0, left - EXIT_S)

    def leave_with(self, request: Preempted) -> Saved:
        """Decide what the loop saves after ``request``; the ledger records the decision.

        This is a full checkpoint, or the journal alone if the checkpoint does not fit into the time
        left or the trainer is in the middle of a step.
        """
        left, needed = self.time_left_s(), self.saves.estimate_s
        self.left_with = "journal" if isinstance(request, HalfTrained) else leave_with(left, needed)
        time_left = "the deadline is unknown" if left is None else f"{left:.0f} s are left"
        logger.warning(
            "%s, a checkpoint takes about %.0f s: saving the %s", time_left, needed, self.left_with
        )
        return self.left_with

    async def unless_requested(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``. On a stop request cancel it and raise Preempted."""
        return await await_unless(work, self._raise_when_requested())

    async def _raise_when_requested(self) -> None:
        self.check()
        await self.wait()
        self.check()

    async def wait(self, *work: asyncio.Future[Any]) -> None:
        """Return once a stop is requested or one of ``work`` is done."""
        await asyncio.wait(
            [*work, self._poll_until_requested()], return_when=asyncio.FIRST_COMPLETED
        )

    def _poll_until_requested(self) -> asyncio.Task[None]:
        """Return a task that ends at a stop request. All callers share it, and with it one poll."""
        loop = asyncio.get_running_loop()
        if (
            self._poll_task is None
            or self._poll_task.get_loop() is not loop
            or self._poll_task.done()
        ):
            self._poll_task = loop.create_task(self._until_requested())
        return self._poll_task

    async def _until_requested(self) -> None:
        while not self.requested():
            await asyncio.sleep(POLL_S)

    def _read(self) -> StopMessage:
        if self._message is None:
            try:
                text = self._path.read_text(errors="replace")
                message = parse_stop(text)
                written = message.time
                if written is None and message.deadline is None:
                    written = self._path.stat().st_mtime  # a plain text file of a user
            except OSError as error:  # the next poll may read the deadline
                return StopMessage(f"its reason cannot be read: {error}")
            message = StopMessage(message.reason, written, message.deadline)
            if not text.strip():  # without hard links the file appears before its content
                return message
            self._message = message
        return self._message
