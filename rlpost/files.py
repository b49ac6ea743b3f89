"""Files that outlive a crash of the machine, whole. Standard library alone.

``slurm`` and ``bootstrap`` know nothing of this package and have their own; so has ``checkpoint.commit``, whose tests
crash it between any two calls of the system.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, texts: Iterable[str]) -> None:
    """Put texts, one after the other, at ``path``: a reader sees the file that was there or the whole new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


async def in_daemon(act: Callable[[], T]) -> T:
    """What ``act`` returns, from a thread that the end of the process does not wait for: storage may hang for ever."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not found.done():  # else nobody waits any more
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
