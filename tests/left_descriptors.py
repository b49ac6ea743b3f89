"""Descriptors that outlive the tests of a file: a worker runs hundreds of files and may hold 1,024."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Set

FOLDER = "/proc/self/fd"
MOST_LEFT = 32
"""Open after a file: what libraries keep for the process and fixtures for the session, such as the
connections of Ray's driver or the logs of a server.
"""
GRACE_S = 5.0
"""Threads that were told to end close theirs a moment later."""
COUNTED = ("socket:", "pipe:", "anon_inode:[event")
"""Not files: tests abandon writers, as a kill of their process would, and libraries map theirs."""


def open_descriptors() -> Set[tuple[int, str]]:
    """Return the number and target of each open descriptor; those of sockets and pipes are unique.

    Without ``/proc`` there are none.
    """
    found = set()
    for number in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
        try:
            target = os.readlink(f"{FOLDER}/{number}")
        except OSError:  # that of the folder itself, or closed by a thread
            continue
        if target.startswith(COUNTED):
            found.add((int(number), target))
    return found


def left_descriptors(
    before: Set[tuple[int, str]], most: int = MOST_LEFT, grace_s: float = GRACE_S
) -> list[str]:
    """Return the targets of descriptors opened since ``before``; none up to ``most``.

    Collects garbage only if there are more: objects in cycles keep theirs until then.
    """
    deadline = time.monotonic() + grace_s
    if len(left := open_descriptors() - before) > most:
        gc.collect()
        while len(left := open_descriptors() - before) > most and time.monotonic() < deadline:
            time.sleep(0.05)
    return sorted(target for _, target in left) if len(left) > most else []
