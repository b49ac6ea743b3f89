"""Time and threads of an attempt: an event loop whose clock jumps, and threads that run one at a time.

So a trial is deterministic and waits for nothing. A thread that an attempt starts runs when the thread that started it
waits: in its event loop, or for a future. That one goes on when the other has ended, or hangs in storage. An event loop
that waits for nothing, or for ever, ends with Hung.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tests.crash_consistency.interception import ROOM, Attempt, Hung, Killed

MOST_TURNS = 150_000  # of an event loop in one attempt; an undisturbed one takes a few thousand
REAL_THREAD, REAL_SLEEP, REAL_WAIT = threading.Thread, time.sleep, concurrent.futures.wait
UNKNOWN_S = 2.0  # real seconds until a thread runs though nobody is seen to wait for it
LONG_S = 60.0  # real seconds that the starter of a thread waits for its end


class _Selector(selectors.SelectSelector):
    """Has nothing to wait for: time passes at once."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self._attempt, self._turns = attempt, 0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Let other threads run, or ``timeout`` seconds pass."""
        self._turns += 1
        if run_threads(self._attempt):
            return []
        if timeout is None:
            raise _hung(self._attempt, "the event loop waits for what never comes")
        if self._turns > MOST_TURNS:
            raise _hung(self._attempt, f"the event loop turned {MOST_TURNS} times")
        if timeout > 0:
            self._attempt.clock += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is the attempt's."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        super().__init__(_Selector(attempt))
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        """Virtual seconds."""
        return self._attempt.clock

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """In a thread that runs at once."""
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
        """A virtual one where an attempt runs."""
        attempt = getattr(ROOM, "attempt", None)
        return super().new_event_loop() if attempt is None else VirtualLoop(attempt)


class Thread(REAL_THREAD):
    """One that runs while its starter waits."""

    def start(self) -> None:
        """Be ready to run."""
        self._attempt = getattr(ROOM, "attempt", None)
        self._may_run, self._rests = threading.Event(), threading.Event()
        if self._attempt is not None:
            self.daemon = True
            self._attempt.workers.append(self)
            self._attempt.ready.append(self)
        super().start()

    def run(self) -> None:
        """As its starter's attempt."""
        if self._attempt is None:
            super().run()
            return
        self._may_run.wait(UNKNOWN_S)
        ROOM.attempt, ROOM.rests = self._attempt, self._rests
        try:
            super().run()
        except Killed:
            pass
        finally:
            self._rests.set()

    def proceed(self) -> None:
        """Run to the end, or until it hangs."""
        self._may_run.set()
        self._rests.wait(LONG_S)


def run_threads(attempt: Attempt) -> bool:
    """Let the threads run that the attempt has started; whether there were any."""
    had_any = False
    while attempt.ready:
        had_any = True
        attempt.ready.pop(0).proceed()
    return had_any


def end_threads(attempt: Attempt) -> None:
    """The process has ended: threads that have not run, or hang, end without an effect."""
    assert attempt.is_dead
    for thread in attempt.workers:
        thread.proceed()
        thread.join(LONG_S)
    attempt.ready.clear()


def _sleep(seconds: float) -> None:
    attempt = getattr(ROOM, "attempt", None)
    if attempt is None:
        REAL_SLEEP(seconds)
    else:
        attempt.clock += seconds


def _wait(futures: Any, timeout: float | None = None, **how: Any) -> Any:
    """As concurrent.futures.wait."""
    attempt = getattr(ROOM, "attempt", None)
    if attempt is None:
        return REAL_WAIT(futures, timeout, **how)
    run_threads(attempt)
    found = REAL_WAIT(futures, 0, **how)
    if found.not_done and timeout is None:
        raise _hung(attempt, "it waits for a thread that hangs")
    attempt.clock += timeout if found.not_done and timeout else 0.0
    return found


def _hung(attempt: Attempt, why: str) -> Hung:
    """The end of an attempt that would never end."""
    attempt.is_dead, attempt.hung = True, attempt.hung or why
    return Hung(why)


def hang(attempt: Attempt, released: threading.Event) -> None:
    """An operation that does not return. In the thread of an event loop that is the end of the attempt."""
    rests = getattr(ROOM, "rests", None)
    if rests is None:
        raise _hung(attempt, "storage that does not answer blocks the event loop")
    rests.set()
    released.wait(60.0)
    raise attempt.die()


class InlineExecutor:
    """A ThreadPoolExecutor whose work is done when it is handed over."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function: Callable[..., Any], *items: Any, **named: Any) -> Iterator[Any]:
        """As map."""
        return map(function, *items)

    def submit(self, function: Callable[..., Any], *given: Any, **named: Any) -> concurrent.futures.Future[Any]:
        """Done when it returns."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*given, **named))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *given: Any, **named: Any) -> None:
        """Nothing to end."""


def _everywhere(stand_ins: dict[Any, Any]) -> Iterator[Any]:
    """Patches of every module of the project that has one of these functions under any name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("rlpost.", "slurm.")):
            for attribute, value in list(vars(module).items()):
                if callable(value) and any(value is real for real in stand_ins):
                    yield mock.patch.object(module, attribute, stand_ins[value])


@contextmanager
def virtual_time() -> Iterator[None]:
    """Event loops and threads of attempts are virtual within."""
    before = asyncio.get_event_loop_policy()
    stand_ins = {concurrent.futures.ThreadPoolExecutor: InlineExecutor, REAL_WAIT: _wait, REAL_SLEEP: _sleep}
    with ExitStack() as undo:
        undo.callback(asyncio.set_event_loop_policy, before)
        asyncio.set_event_loop_policy(_Policy())
        undo.enter_context(mock.patch.object(threading, "Thread", Thread))
        undo.enter_context(mock.patch.object(time, "sleep", _sleep))
        for patch in _everywhere(stand_ins):
            undo.enter_context(patch)
        yield
