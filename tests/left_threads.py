"""Threads that outlive their test: they log, write files and read replaced names in the next one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Set
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / name}{os.sep}" for name in ("rlpost", "common", "slurm", "bootstrap"))
GRACE_S = 5.0
"""A thread that was told to end may still be running its last lines on a busy machine."""


def left_threads(before: Set[threading.Thread], grace_s: float = GRACE_S) -> list[str]:
    """Name the threads that were started since ``before`` and must not continue.

    These are threads that keep the process alive, and daemons that execute code of this project.
    """
    names = []
    for thread in set(threading.enumerate()) - before:
        if thread.daemon and not _runs_ours(thread):
            continue
        thread.join(grace_s)
        if thread.is_alive():
            names.append(f"{thread.name}: {getattr(thread, '_target', None) or type(thread)}")
    return names


def _runs_ours(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            return True
        frame = frame.f_back
    return False
