"""Have the reports of a run written while it trains, and at its end.

Extensions write them (``Extension.report``); without one, nothing is written.
"""

from __future__ import annotations

import logging
import threading

from common.run_folder import RunFolder
from rlpost.config.extensions import load, reports

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0  # at the end of a run, for a report that is being written
_writing = threading.Lock()  # one report at a time in this process


def try_to_write_report(run: RunFolder) -> None:
    """Write the reports once no other thread writes them.

    A failure is only logged: it must end neither a run nor the reports of other extensions.
    """
    if not _writing.acquire(timeout=PATIENCE_S):
        logger.warning(
            "no report this time: an earlier one is still being written to %s", run.report
        )
        return
    try:
        for extension, path in reports().items():
            _try_to_write(extension, path, run)
    finally:
        _writing.release()


def _try_to_write(extension: str, path: str, run: RunFolder) -> None:
    try:
        load(path)(run)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        logger.warning("no report of the extension %s this time: %s", extension, why)


class Reporter:
    """Writes the page in a background thread, because that of a long run takes a second.

    Requests that arrive while a page is being written lead to one more page. The thread is a
    daemon: the last page of a run is written by ``try_to_write_report``.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._asked = threading.Lock()  # guards the two below
        self._again = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Request a page; returns at once."""
        with self._asked:
            if self._thread is not None:
                self._again = True
                return
            self._thread = threading.Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        while True:
            try_to_write_report(self._run)
            with self._asked:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
