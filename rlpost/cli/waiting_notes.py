"""Notes of a command that waits: what it waits for, and how long that usually takes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SILENT_S = 10.0
CHECKS = "the checks of settings, files and prompts (usually 1 to 20 s)"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Print every SILENT_S seconds, on standard error, what the calls inside wait for.

    Args:
        what: what is waited for, with the usual time in parentheses.
    """
    started, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(SILENT_S):
            print(note(time.monotonic() - started, what), file=sys.stderr, flush=True)

    reporting = threading.Thread(target=report, name="notes", daemon=True)
    reporting.start()
    try:
        yield
    finally:
        ended.set()
        reporting.join()


def note(seconds: float, what: str) -> str:
    """Return the line about a wait of ``seconds`` so far."""
    return f"... {seconds:.0f} s: waiting for {what}"
