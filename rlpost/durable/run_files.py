"""Deadlines, retries and ownership checks for a run's files, except checkpoints and journal.

Input: writes of one file, each a function. Output: the same writes, in order, in a thread, so that
the event loop never blocks on storage. A failed write is retried: at once after a transient error,
else with the next write. A write that exceeds the deadline continues in the background. Neither
case ends a run: the log names the file, the error, the remedy and what is lost if the run ends
first.
Invariant: no write begins after ``check`` has raised Fenced.

The table of all files of a run is in docs/durability.md.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TypeVar

from common.files import full_words
from rlpost.errors import Fenced

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_S = 60.0
LAST_S = 10.0
"""Deadline for writes at the end of a run, which may be killed soon."""
RETRY_AFTER_S = (0.1, 0.5, 1.0)
MAY_PASS = frozenset(
    {
        errno.EINTR,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOENT,
        errno.ENOLCK,
    }
)
"""Errors of a file server that restarts or fails over, and of a file that another client has just
replaced.
"""

_MEND = "repair the storage or the mount"
_REMEDIES = {
    errno.EFBIG: "raise the limit of the size of a file",
    errno.EROFS: "mount it for writing again",
    errno.EACCES: "give the user of the job the right to write there",
    errno.EPERM: "give the user of the job the right to write there",
    errno.ENOENT: "put the folder back",
    errno.EIO: _MEND,
    errno.ESTALE: _MEND,
    errno.ETIMEDOUT: _MEND,
    errno.ENODEV: _MEND,
    errno.ENXIO: _MEND,
    errno.ENOTCONN: _MEND,
    errno.EREMOTEIO: _MEND,
    errno.ESHUTDOWN: _MEND,
}


def storage_words(error: OSError, path: Path | str | None = None) -> str | None:
    """Return ``FILE: error; remedy``; None for an error that is not one of storage.

    >>> storage_words(OSError(28, "No space left on device", "/runs/a/metrics.jsonl"))
    '/runs/a/metrics.jsonl: No space left on device; make room there, or raise the quota'
    """
    remedy = full_words(error, Path(path) if path else None) or _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    place = error.filename2 or error.filename or path or "a file of the run"
    return (
        f"{os.fsdecode(place) if isinstance(place, bytes) else place}: {error.strerror}; {remedy}"
    )


def read_again(read: Callable[[], T]) -> T:
    """Return the result of ``read``, repeated after RETRY_AFTER_S while it raises OSError. Blocks.

    A file server may fail over. Raises the OSError that remains.
    """
    for pause_s in RETRY_AFTER_S:
        try:
            return read()
        except OSError:
            time.sleep(pause_s)
    return read()


class RunFile:
    """Writes of one file of a run. Every method may be called from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        lost: str,
        check: Callable[[], None] = lambda: None,
        deadline_s: float | None = None,
        max_waiting: int = 100_000,
    ) -> None:
        """
        Args:
            lost: the consequence of a lost write, for messages.
            check: raises Fenced when another attempt owns the run.
            max_waiting: limit of pending writes, which are held in memory; further ones are
                dropped.
        """
        self._path, self._lost = path, lost
        self._check = check
        self._deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        self._max_waiting = max_waiting
        self._lock = threading.Lock()  # guards the attributes below
        self._waiting: deque[tuple[Callable[[], object], Future[bool]]] = deque()
        self._thread: threading.Thread | None = None
        self._fenced: Fenced | None = None
        self._is_late = False

    def soon(self, act: Callable[[], object], *, is_last: bool = False) -> Future[bool]:
        """Queue ``act`` after all earlier writes; return immediately.

        The result is True when the write is done, and False when it failed and is retried with the
        next one; it raises Fenced when the write is refused. ``act`` must be safe to retry after an
        OSError. ``is_last`` ignores the limit of pending writes.
        """
        done: Future[bool] = Future()
        with self._lock:
            if self._fenced is not None:
                done.set_exception(self._fenced)
                return done
            if len(self._waiting) >= self._max_waiting and not is_last:
                logger.error(
                    "%s: a write is lost, %d wait already: %s",
                    self._path,
                    self._max_waiting,
                    self._lost,
                )
                done.set_result(False)
                return done
            self._waiting.append((act, done))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=self._path.name, daemon=True
                )
                self._thread.start()
        return done

    async def do(self, act: Callable[[], object]) -> bool:
        """Like ``soon``, but wait up to the deadline; return False if the write failed or is late.

        While a write is late, later ones return at once. Raises Fenced.
        """
        done = asyncio.wrap_future(self.soon(act))
        await asyncio.wait([done], timeout=0.0 if self._is_late else self._deadline_s)
        return self._outcome(done.done(), done.result)

    def finish(self, act: Callable[[], object] = lambda: None) -> bool:
        """Like ``do``, but blocking, within LAST_S; False while earlier writes wait. Raises Fenced."""
        done = self.soon(act, is_last=True)
        wait_for([done], timeout=min(self._deadline_s, LAST_S))
        return self._outcome(done.done(), done.result)

    def close(self) -> bool:
        """Retry pending writes once; log what is lost if they fail. True if no write is pending."""
        with self._lock:
            nothing_waits = not self._waiting
        if nothing_waits:
            return True
        try:
            is_done = self.finish()
        except Fenced:
            return True
        if not is_done:
            logger.error(
                "%s: %d writes are lost: %s", self._path, len(self._waiting) - 1, self._lost
            )
        return is_done

    def _outcome(self, is_done: bool, result: Callable[[], bool]) -> bool:
        if not is_done:
            if not self._is_late:
                logger.error(
                    "%s: a write takes more than %.0f s and continues in the background; %s. If the run ends first, %s",
                    *(self._path, self._deadline_s, _MEND, self._lost),
                )
            self._is_late = True
            return False
        self._is_late = False
        return result()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                act, done = self._waiting[0]
            try:
                self._attempt(act)
            except OSError as error:
                self._put_off(error)
                return
            except Fenced as error:
                self._refuse_all(error)
                return
            except BaseException as error:
                self._resolve(done, error)
            else:
                self._resolve(done, None)

    def _attempt(self, act: Callable[[], object]) -> None:
        for pause_s in (*RETRY_AFTER_S, None):
            self._check()
            try:
                act()
                return
            except OSError as error:
                self._check()  # a newer attempt may own the file
                if pause_s is None or error.errno not in MAY_PASS:
                    raise
                time.sleep(pause_s)

    def _resolve(self, done: Future[bool], error: BaseException | None) -> None:
        with self._lock:
            self._waiting.popleft()
            had_failed = done.done()  # ``_put_off`` has reported it to the caller
            if not had_failed and error is None:
                done.set_result(True)
            elif not had_failed:
                done.set_exception(error)
        if had_failed and error is None:
            logger.info("%s: pending writes have succeeded", self._path)

    def _put_off(self, error: OSError) -> None:
        """Keep pending writes for a retry with the next one."""
        words = storage_words(error, self._path) or f"{self._path}: {error}"
        logger.error(
            "%s. Writes pending in memory, to be retried with the next one: %d; if the run ends first, %s",
            *(words, len(self._waiting), self._lost),
        )
        with self._lock:
            self._thread = None
            for _, done in self._waiting:
                if not done.done():
                    done.set_result(False)

    def _refuse_all(self, error: Fenced) -> None:
        with self._lock:
            self._fenced, self._thread = error, None
            for _, done in self._waiting:
                if not done.done():
                    done.set_exception(error)
            self._waiting.clear()
