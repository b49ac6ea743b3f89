"""Virtual time and threads of an attempt: a virtual clock, and threads that run one at a time.

A trial is therefore deterministic and never sleeps. A thread of an attempt runs when the thread
that started it waits, in its event loop or for a future. The starter continues when the thread has
ended or hangs in storage. An event loop with nothing to wait for, or that waits forever, raises
Hung.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from common import ledger
from tests.crash_consistency.interception import ROOM, Attempt, Hung, Killed

MOST_TURNS = 15_000  # of an event loop in one attempt; an undisturbed one takes a few thousand
REAL_THREAD, REAL_SLEEP, REAL_WAIT = threading.Thread, time.sleep, concurrent.futures.wait
REAL_RESULT, REAL_MONOTONIC = concurrent.futures.Future.result, time.monotonic
LONG_S = 60.0  # real seconds that the starter of a thread waits for the thread's end


class _Selector(selectors.SelectSelector):
    """Advances the virtual clock instead of waiting."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self._attempt = attempt

    def select(self, timeout: float | None = None) -> list[Any]:
        """Run other threads, or advance the clock by ``timeout`` seconds."""
        self._attempt.turns += 1
        if run_threads(self._attempt, is_due=timeout is not None):
            return []
        if wake(self._attempt, timeout):
            return []
        if timeout is None:
            raise _hung(
                self._attempt, "the event loop waits without a timeout and no thread is left"
            )
        if self._attempt.turns > MOST_TURNS:
            self._attempt.waits = True
            raise _hung(self._attempt, f"it waits still after {self._attempt.clock:.0f} s")
        if timeout > 0:
            self._attempt.clock += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with the clock of its attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        super().__init__(_Selector(attempt))
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        """Return virtual seconds."""
        return self._attempt.clock

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run ``func`` in a virtual thread."""
        future: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            try:
                self.call_soon_threadsafe(future.set_result, func(*args))
            except BaseException as error:
                self.call_soon_threadsafe(future.set_exception, error)

        Thread(target=run).start()
        return future


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a virtual event loop while an attempt runs."""
        attempt = getattr(ROOM, "attempt", None)
        return super().new_event_loop() if attempt is None else VirtualLoop(attempt)


class Thread(REAL_THREAD):
    """A thread that runs while its starter waits.

    It runs in the starter's own thread, unless storage may hang.
    """

    def start(self) -> None:
        """Queue the thread; it runs later."""
        self._attempt: Attempt | None = getattr(ROOM, "attempt", None)
        if self._attempt is None:
            super().start()
            return
        self._rests: threading.Event | None = None
        self.hangs = False
        self._due = self._attempt.turns + (self._attempt.lag if self.name == "journal" else 0)
        self._attempt.ready.append(self)

    def run(self) -> None:
        """Run as part of its starter's attempt."""
        if self._attempt is None:
            super().run()
            return
        before = getattr(ROOM, "thread", None)
        ROOM.attempt, ROOM.thread = self._attempt, self
        try:
            super().run()
        except (
            Killed,
            Exception,
        ):
            # the starter gets the error from its future, or is killed at its next operation
            pass
        finally:
            ROOM.thread = before
            if self._rests is not None:
                self._rests.set()

    def proceed(self) -> None:
        """Run until the thread ends or hangs."""
        assert self._attempt is not None
        self._attempt.ready.remove(self)
        if not any(hook.may_hang for hook in self._attempt.hooks):
            self.run()
            return
        self.daemon, self._rests = True, threading.Event()
        self._attempt.workers.append(self)
        super().start()
        self._rests.wait(LONG_S)

    @property
    def is_due(self) -> bool:
        """Whether its lag is over."""
        return self._attempt is None or self._attempt.turns >= self._due

    def hang(self) -> None:
        """Mark the thread as hanging, so that its starter does not wait for it."""
        assert self._rests is not None, "it runs in its starter's own thread"
        self.hangs = True
        self._rests.set()

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        if self._attempt is None:
            return super().is_alive()
        return self in self._attempt.ready or (self.hangs and super().is_alive())

    def join(self, timeout: float | None = None) -> None:
        """Run the thread, or advance the clock by ``timeout`` seconds when it hangs."""
        if self._attempt is None or self._attempt.is_dead:
            if self._attempt is None or self._rests is not None:
                super().join(timeout)
            return
        if self in self._attempt.ready:
            self.proceed()
        while self.hangs and wake(self._attempt, timeout):
            pass
        if self.hangs and timeout is None:
            raise _hung(self._attempt, "it waits for a thread that hangs")
        self._attempt.clock += (timeout or 0.0) if self.hangs else 0.0


def run_threads(attempt: Attempt, *, is_due: bool = False) -> bool:
    """Run the threads that the attempt has started; return whether there were any.

    ``is_due``: run only the threads whose lag is over.
    """
    had_any = False
    while ready := [thread for thread in attempt.ready if thread.is_due or not is_due]:
        had_any = True
        ready[0].proceed()
    return had_any


@dataclass(eq=False)
class Sleeper:
    """A thread whose operation returns at ``due`` on the attempt's clock."""

    due: float
    thread: Thread
    goes: threading.Event = field(default_factory=threading.Event)


def wake(attempt: Attempt, within_s: float | None) -> bool:
    """Advance the clock to the first operation that returns ``within_s``, and run its thread.

    Return False without such an operation. None is any time.
    """
    first = min(attempt.sleepers, key=lambda each: each.due, default=None)
    if first is None or (within_s is not None and first.due > attempt.clock + within_s):
        return False
    attempt.clock = max(attempt.clock, first.due)
    attempt.sleepers.remove(first)
    first.thread.hangs, first.thread._rests = False, threading.Event()
    first.goes.set()
    first.thread._rests.wait(LONG_S)
    return True


def hang_until(attempt: Attempt, due: float) -> None:
    """Simulate an operation that returns at ``due``; it must not be one of an event loop."""
    thread = getattr(ROOM, "thread", None)
    if thread is None:
        hang(attempt, threading.Event())
    assert thread is not None, "an event loop that blocks has ended the attempt"
    sleeper = Sleeper(due, thread)
    attempt.sleepers.append(sleeper)
    thread.hang()
    sleeper.goes.wait(LONG_S)
    if attempt.is_dead:
        raise attempt.die()


def end_threads(attempt: Attempt) -> None:
    """End all threads of a dead process.

    Threads that have not run never do; hanging threads end without an effect.
    """
    assert attempt.is_dead
    attempt.ready.clear()
    for sleeper in attempt.sleepers:
        sleeper.goes.set()
    for thread in attempt.workers:
        thread.join(LONG_S)


def _sleep(seconds: float) -> None:
    attempt = getattr(ROOM, "attempt", None)
    if attempt is None:
        REAL_SLEEP(seconds)
    else:
        attempt.clock += seconds


def _monotonic() -> float:
    """Return the virtual clock, so that code that polls until a deadline reaches it."""
    attempt = getattr(ROOM, "attempt", None)
    return REAL_MONOTONIC() if attempt is None else attempt.clock


def _wait(futures: Any, timeout: float | None = None, **how: Any) -> Any:
    """Virtual ``concurrent.futures.wait``."""
    attempt = getattr(ROOM, "attempt", None)
    if attempt is None:
        return REAL_WAIT(futures, timeout, **how)
    run_threads(attempt)
    found = REAL_WAIT(futures, 0, **how)
    while found.not_done and wake(attempt, timeout):
        run_threads(attempt)
        found = REAL_WAIT(futures, 0, **how)
    if found.not_done and timeout is None:
        raise _hung(attempt, "it waits for a thread that hangs")
    attempt.clock += timeout if found.not_done and timeout else 0.0
    return found


def _hung(attempt: Attempt, why: str) -> Hung:
    """Mark an attempt as hung; the caller raises the returned exception."""
    attempt.is_dead, attempt.hung = True, attempt.hung or why
    return Hung(why)


def hang(attempt: Attempt, released: threading.Event) -> None:
    """Simulate an operation that does not return.

    In the thread of an event loop, it ends the attempt.
    """
    thread = getattr(ROOM, "thread", None)
    if thread is None:
        frames = [frame for frame in traceback.extract_stack() if "/rlpost/" in frame.filename]
        where = " < ".join(
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[:-4:-1]
        )
        raise _hung(attempt, f"storage that does not answer blocks the event loop, in {where}")
    thread.hang()
    released.wait(LONG_S)
    raise attempt.die()


class InlineExecutor:
    """A ThreadPoolExecutor that runs work in the caller when it is submitted."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function: Callable[..., Any], *items: Any, **named: Any) -> Iterator[Any]:
        """Apply the function in the caller's thread."""
        return map(function, *items)

    def submit(
        self, function: Callable[..., Any], *given: Any, **named: Any
    ) -> concurrent.futures.Future[Any]:
        """Call the function; return a finished future."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*given, **named))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *given: Any, **named: Any) -> None:
        """Do nothing."""


def _result(future: Any, timeout: float | None = None) -> Any:
    """Virtual ``concurrent.futures.Future.result``."""
    attempt = getattr(ROOM, "attempt", None)
    if attempt is not None and not future.done():
        run_threads(attempt)
        while not future.done() and wake(attempt, timeout):
            run_threads(attempt)
        if not future.done():
            if timeout is None:
                raise _hung(attempt, "it waits for a thread that hangs")
            attempt.clock += timeout
            raise TimeoutError
    return REAL_RESULT(future, timeout)


def _everywhere(stand_ins: dict[Any, Any]) -> Iterator[Any]:
    """Yield patches for all names by which project modules have imported these functions."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("rlpost.", "slurm.")):
            for attribute, value in list(vars(module).items()):
                if callable(value) and any(value is real for real in stand_ins):
                    yield mock.patch.object(module, attribute, stand_ins[value])


@contextmanager
def virtual_time() -> Iterator[None]:
    """Make event loops and threads of attempts virtual within the block."""
    before = asyncio.get_event_loop_policy()
    stand_ins = {
        concurrent.futures.ThreadPoolExecutor: InlineExecutor,
        REAL_WAIT: _wait,
        REAL_SLEEP: _sleep,
    }
    with ExitStack() as undo:
        undo.callback(asyncio.set_event_loop_policy, before)
        asyncio.set_event_loop_policy(_Policy())
        undo.enter_context(mock.patch.object(threading, "Thread", Thread))
        undo.enter_context(mock.patch.object(time, "sleep", _sleep))
        clock = SimpleNamespace(monotonic=_monotonic, sleep=_sleep)
        undo.enter_context(mock.patch.object(ledger, "time", clock))
        undo.enter_context(mock.patch.object(concurrent.futures.Future, "result", _result))
        for patch in _everywhere(stand_ins):
            undo.enter_context(patch)
        yield
