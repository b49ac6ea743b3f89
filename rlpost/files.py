"""Atomic, durable file writes, and calls in daemon threads. Standard library only.

``slurm`` and ``bootstrap`` do not import this package and have their own functions.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


REFUSES_FOLDERS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF})
"""Errors of file systems without fsync of a folder (CIFS, some FUSE file systems)."""


def sync(path: Path) -> None:
    """Fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            sync_names(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: int) -> None:
    """Fsync an open folder; do nothing where the file system does not support that."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in REFUSES_FOLDERS:
            raise


def write_whole(path: Path, texts: Iterable[str], *, through: Path | None = None) -> None:
    """Write ``texts`` to ``path`` atomically: a reader sees the old file or the complete new one.

    ``through`` is the temporary file, on the same file system; the default is a file beside ``path``.
    """
    beside = through or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "w") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_within(folder: int, name: str, text: str) -> None:
    """Like ``write_whole``, in the folder of an open descriptor, even if that folder was renamed."""
    temporary = f".{name}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    sync_names(folder)


def started(act: Callable[[], T]) -> Future[T]:
    """Run ``act`` in a daemon thread; return a future of its result."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            result = act()
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return found


async def in_daemon(act: Callable[[], T]) -> T:
    """Run ``act`` in a daemon thread and return its result; hung storage does not block the exit."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not found.done():  # else the caller was cancelled
            found.set_exception(error) if error is not None else found.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result = error = None
        try:
            result = act()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await found
