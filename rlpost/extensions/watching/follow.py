"""Follow a run to its end: stream the driver's log over all attempts, then print the outcome.

Input: the run folder and the job id. Output: lines on standard output and an exit code. Slurm is
queried rarely; the rest is read from the run folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from common.files import open_regular
from common.run_folder import RunFolder
from rlpost.cli.outcome import conclude, show_until_over
from rlpost.cli.runs import LOCAL
from rlpost.extensions.watching.log_lines import DAY, LogSelection, merged, prefixed, wall_seconds
from rlpost.extensions.watching.startup_notes import StartupNotes


def follow(
    run: RunFolder,
    job_id: str,
    *,
    selection: LogSelection | None = None,
    started_it: bool = False,
    since: float | None = None,
    resume: str = "",
    earlier: str = "",
    explains: bool = False,
) -> int:
    """Print the driver's log, or the logs of ``selection``, until the job is over; return 0 if done.

    With ``since``, only records from that second of local time on. ``resume`` is the command that
    resumes the run. ``earlier`` is the newest attempt before the submission, which is not printed.
    ``explains``: until the first step, say what the run waits for.

    An interrupt is handled as in ``rlpost.cli.outcome.show_until_over``.
    """
    selection = selection or LogSelection(has_diagnostics=False)
    log = _LogTail(run.attempts, selection, since, earlier=earlier)
    is_local = job_id.startswith(LOCAL)
    notes = StartupNotes(time.monotonic(), is_local=is_local) if explains else None

    def show() -> None:
        printed = log.print_new()
        if notes is not None:
            _print_note(notes, printed, has_attempt=log.has_attempt)

    show_until_over(run, job_id, show, started_it=started_it)
    return conclude(run, resume=resume, earlier=earlier)


def _print_note(notes: StartupNotes, printed: str, *, has_attempt: bool) -> None:
    now = time.monotonic()
    if printed:
        notes.heard(printed, now)
    if (line := notes.due(has_attempt, now)) is not None:
        print(line, flush=True)


class _LogTail:
    """Prints new records of the wanted logs of the newest attempt."""

    def __init__(
        self,
        attempts: Path,
        wanted: LogSelection,
        since: float | None = None,
        *,
        earlier: str = "",
    ) -> None:
        self._attempts = attempts
        self._earlier = earlier  # the attempt that is not printed
        self._since = since
        self._wanted = wanted
        self._current: Path | None = None
        self._read: dict[str, int] = {}  # bytes read of each log

    @property
    def has_attempt(self) -> bool:
        return self._current is not None

    def print_new(self) -> str:
        """Print what is new; return the last record of it, empty if there is none."""
        latest = self._attempts / "latest"
        attempt = latest.resolve() if latest.exists() else None
        if attempt is not None and attempt != self._current and attempt.name != self._earlier:
            self._print_rest()
            self._current, self._read = attempt, {}
            print(f"--- attempt {attempt.name}: {attempt}", flush=True)
        return self._print_rest()

    def _print_rest(self) -> str:
        if self._current is None:
            return ""
        new: dict[str, Iterable[str]] = {}
        for path in self._current.glob("*.log"):
            if self._wanted.log(path.stem):
                new[path.stem] = self._wanted.records(self._new_lines(path))
        width = max(map(len, new), default=0)
        today = wall_seconds(datetime.now()) // DAY * DAY
        record = ""
        for name, record in merged(new, days=dict.fromkeys(new, today), since=self._since):
            shown = record if self._wanted.is_one else prefixed(name, record, width)
            print(shown, end="", flush=True)
        return record

    def _new_lines(self, path: Path) -> list[str]:
        with open_regular(path) as file:
            file.seek(self._read.get(path.stem, 0))
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]  # the rest of a line may not be written yet
        self._read[path.stem] = self._read.get(path.stem, 0) + len(whole)
        return whole.decode(errors="replace").splitlines(keepends=True)
