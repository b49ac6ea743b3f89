"""The ledger of a run: an append-only file of JSON lines, one per event.

Input: events from the login node, the batch host and the driver. Output: the same events in order.

Login node:
    submitting   before sbatch, also by the batch host: see ``slurm.submissions``
    submitted    job_id (123, or 123;CLUSTER on another cluster), nodes, file
    rejected     file, reason: the submission of this file made no job
    cancelled    job_id
    fleet        array, engines, group (of a table [engines.NAME]), file: engine jobs were submitted
    sandboxes    array, servers, file: sandbox servers were submitted

Batch host:
    attempt      attempt, job_id (123, or 123_4 of an array), nodes, num_nodes, image, code, home;
                 at each start of the job
    verdict      attempt, verdict, cause, answer, reason, exclude, final (the job must not start
                 again); at each end. A second one with correction: Slurm refused the restart
    chained      attempt, job_id, file; in place of a requeue

Driver:
    started      attempt, step, nodes, gpus (by role), again (steps of earlier attempts that it
                 trains again): the cluster is up
    ready        attempt, step: trainer and engines answer
    committed    step, checkpoint, bytes, seconds, blocking_s
    hang         attempt, call, ranks, hosts, why, seconds, stacks: ranks make no progress
    slow_host    host, peer (time beside the fastest host), steps: a proposal to exclude it
    engine_lost  engines, phase, cause: engines no longer serve
    recovered    role, cause, seconds: a lost part works again, in the same attempt; by role also
                 driver: attempt, incarnation, step, steps_again, again;
                 trainer: ranks, phase, step, steps_again;
                 engine: engines, phase, version;
                 node: phase, host, replacement
    preempted    reason, step, saved, seconds_from_signal: the state is saved
    fleet        used (seconds in which each engine served, of this attempt), served_gpu_s (of all),
                 allocated (GPU-seconds of the job of each engine), group
    done         step, weights

Invariants: a line is durable when ``append`` returns; a truncated or damaged line does not affect
other lines. The login node, the batch host and the driver append from different hosts, and appends
of several NFS clients are not atomic: each line is written under a lock if the file system has
locks, read back, and written again if another line replaced it. Batch hosts may have an old Python:
what runs there needs only the standard library of 3.6 and later.
"""

import errno
import fcntl
import json
import os
import re
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from common.files import read_regular

Entry = Mapping[str, Any]
"""A line of the ledger: ``time``, ``event`` and the JSON values of that event (above)."""
TRIES = 5
LOCK_S, LOCK_POLL_S = 2.0, 0.02
LOOK_BACK_BYTES = 65536
"""Range before the end to search: with a stale size an NFS client writes at an earlier offset."""
LONGEST_SHOWN = 60
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:Z|[+-][01]\d:[0-5]\d)", re.ASCII
)


class Ledger:
    """The file ``path``; each line has ``time`` (UTC, ISO 8601) and ``event``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **details: object) -> None:
        """Append a line and fsync it. ``details`` must be JSON values. Raises OSError."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **details}).encode()
        for _ in range(TRIES):
            size = self._write(line)
            if self._holds(line, max(0, size - LOOK_BACK_BYTES)):
                return
        raise OSError(
            errno.EIO,
            f"a line was overwritten {TRIES} times: do other hosts append here?",
            str(self.path),
        )

    def read(self) -> List[Dict[str, object]]:
        """All entries in order, without damaged lines; empty if there is no file."""
        return [entry for entry in map(_entry, self._lines()) if entry is not None]

    def damage(self) -> List[str]:
        """A message for each damaged line, which ``read`` omits."""
        messages = []
        for number, line in enumerate(self._lines(), start=1):
            if _entry(line) is None:
                shown = line[:LONGEST_SHOWN]
                messages.append(f"line {number} is damaged or half written: {shown!r}")
        return messages

    def _lines(self) -> List[bytes]:
        try:
            data = read_regular(self.path)
        except FileNotFoundError:
            return []
        return [line for line in data.split(b"\n") if line]

    def _write(self, line: bytes) -> int:
        """Append a line; return the size of the file before it."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            _lock(descriptor)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # the last write is incomplete: do not append to its line
            line += b"\n"
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # releases the lock
        return size

    def _holds(self, line: bytes, start: int) -> bool:
        """Whether the file contains the line. Reopen it: NFS revalidates its cache at open."""
        with open(self.path, "rb") as file:
            file.seek(start)
            return line in file.read().split(b"\n")


def _entry(line: bytes) -> Optional[Dict[str, object]]:
    """The entry of a line; None if the line is damaged."""
    try:
        entry = json.loads(line.decode())
        if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
            return None
        if "time" in entry:
            _check_time(entry["time"])
    except (ValueError, TypeError, RecursionError):
        return None
    return entry


def _check_time(text: str) -> None:
    """Raise ValueError or TypeError unless this is a time that can be compared with the others.

    datetime.fromisoformat needs Python 3.7.
    """
    parts = _TIME.fullmatch(text)
    if parts is None:
        raise ValueError(text)
    year, month, day, hour, minute, second = (int(part) for part in parts.groups())
    datetime(year, month, day, hour, minute, second)


def _lock(descriptor: int) -> None:
    """Lock the file; continue without a lock after LOCK_S, or if the file system has no locks."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            is_held = error.errno in (errno.EAGAIN, errno.EACCES)
            if not is_held or time.monotonic() > deadline:
                return
        time.sleep(LOCK_POLL_S)
