"""Identity of a process on its host, and the wait for its end.

A killed process may hold GPU memory and ports until the kernel has ended it, so their
next user waits. A process number can be used again: the start time tells two processes apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
ENDED = ("Z", "X")
"""States of a process that holds nothing any more: a zombie waits for its parent only."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of one host: its number, and its start in clock ticks since the host's boot."""

    pid: int
    started: int


def this_process() -> ProcessId:
    """Return the identity of the calling process."""
    stat = _stat(os.getpid())
    return ProcessId(os.getpid(), 0 if stat is None else stat[1])


def has_ended(process: ProcessId) -> bool:
    """Whether the process holds no memory, device or port any more."""
    stat = _stat(process.pid)
    return stat is None or stat[0] in ENDED or stat[1] != process.started


def wait_for_end(processes: Sequence[ProcessId], within_s: float) -> list[ProcessId]:
    """Return those processes of this host that have not ended after ``within_s`` seconds."""
    end = time.monotonic() + within_s
    left = [process for process in processes if not has_ended(process)]
    while left and time.monotonic() < end:
        time.sleep(POLL_S)
        left = [process for process in left if not has_ended(process)]
    return left


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time of a process, by proc(5); None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces
    return fields[0], int(fields[19])
