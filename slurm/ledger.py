"""The ledger of a run: an append-only file of JSON lines, one an event.

Comes in: events, from the login node, the batch host and the driver. Goes out: the same events in order.

    submitted   job_id, nodes                                             login node
    attempt     attempt, job_id, nodes, image, code                       batch host, at each start of the job
    started     attempt, step, nodes                                      driver: the cluster is up
    ready       attempt, step                                             driver: trainer and engines answer
    committed   step, checkpoint, bytes, seconds                          driver
    preempted   reason, step, saved, seconds_from_signal                  driver: everything is safe
    verdict     attempt, verdict, cause, answer, reason, exclude          batch host, at each end
    chained     attempt, job_id                                           batch host, in place of a requeue
    done        step, weights                                             driver

Invariants: a line is on disk when ``append`` returns; a line that a crash cut off spoils no other. The batch host's own
Python may be old: this module, ``supervise`` and ``image`` run on 3.8 and later, with nothing but its library.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ledger:
    """The file; each line has ``time`` (UTC, ISO 8601) and ``event``."""

    path: Path

    def append(self, event: str, **details: Any) -> None:
        """Add a line; it is on disk when this returns. ``details`` must be JSON values."""
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")  # noqa: UP017
        line = json.dumps({"time": time, "event": event, **details}) + "\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = "\n" + line  # whoever wrote last was cut off: leave its line broken, not ours
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> list[dict[str, Any]]:
        """All entries in order; lines that a crash cut off are left out. Empty without a file."""
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        entries = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                entries.append(entry)
        return entries
