"""The processes of this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil


def living() -> Iterator[psutil.Process]:
    """Yield every process.

    ``psutil.process_iter`` keeps the objects of earlier calls by their pids: where another process
    has the pid since, it yields one that cannot be killed.
    """
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):  # it ended after it was listed
            yield psutil.Process(pid)


def output_of(process: psutil.Process) -> str:
    """Return the path of its standard output; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""
