"""Time and threads of an attempt: an event loop whose clock jumps, and threads that run one at a time.

So a trial is deterministic and waits for nothing. A thread that an attempt starts runs at once; who started it goes on
when it has ended, or when it hangs in storage. An event loop that waits for nothing, or for ever, ends with Hung.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import selectors
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.crash_consistency.interception import ROOM, Attempt, Hung, Killed

MOST_TURNS = 150_000  # of an event loop in one attempt; an undisturbed one takes a few thousand
REAL_THREAD = threading.Thread
LONG_S = 60.0  # real seconds that the starter of a thread waits for its end


class _Selector(selectors.SelectSelector):
    """Has nothing to wait for: time passes at once."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self._attempt, self._turns = attempt, 0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Let ``timeout`` seconds pass."""
        self._turns += 1
        if timeout is None:
            raise Hung("the event loop waits for what never comes")
        if self._turns > MOST_TURNS:
            raise Hung(f"the event loop turned {MOST_TURNS} times")
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
    """One that its starter waits for."""

    def start(self) -> None:
        """Run to the end, or until it hangs."""
        self._attempt = getattr(ROOM, "attempt", None)
        self._rests = threading.Event()
        self.daemon = True
        super().start()
        if self._attempt is not None:
            self._attempt.workers.append(self)
            self._rests.wait(LONG_S)

    def run(self) -> None:
        """As its starter's attempt."""
        ROOM.attempt = self._attempt
        ROOM.rests = self._rests
        try:
            super().run()
        except Killed:
            pass
        finally:
            self._rests.set()


def hang(attempt: Attempt, released: threading.Event) -> None:
    """An operation that does not return. In the thread of an event loop that is the end of the attempt."""
    rests = getattr(ROOM, "rests", None)
    if rests is None:
        attempt.is_dead = True
        raise Hung("storage that does not answer blocks the event loop")
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


@contextmanager
def virtual_time() -> Iterator[None]:
    """Event loops and threads of attempts are virtual within."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_Policy())
    threading.Thread = Thread  # type: ignore[misc]
    try:
        yield
    finally:
        threading.Thread = REAL_THREAD  # type: ignore[misc]
        asyncio.set_event_loop_policy(before)
