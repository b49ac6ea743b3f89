"""The folder RUN/sandboxes on the shared file system: secret, lease of the driver, nodes.

    secret            0600, made by the driver; servers and drivers prove that they know it
    lease.json        renewed by the driver; servers end without it
    nodes/NAME.json   one record for each server, renewed while it serves

Records carry a number that grows with each write. A reader treats a record as alive while the
number changes, by the reader's own clock, so clocks of nodes need not agree.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from common.files import write_atomic, write_first

T = TypeVar("T")
BEAT_SECONDS = 2.0
STALE_SECONDS = 15.0  # without a renewed record, a node is gone


@dataclass(frozen=True)
class NodeRecord:
    """One sandbox server."""

    name: str
    host: str
    port: int
    places: int
    number: int


@dataclass(frozen=True)
class SandboxLease:
    """The driver's heartbeat; ``closed`` at the end of the run."""

    number: int
    closed: bool = False


class Registry:
    """Reads and writes the folder; readers never raise for a missing or damaged file."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / "sandboxes"
        self._nodes = self.folder / "nodes"

    def create(self) -> None:
        """Create the folder and the secret, unless they exist."""
        self._nodes.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_first(self.folder / "secret", secrets.token_hex(32))

    def secret(self) -> bytes:
        """Return the secret. Raises FileNotFoundError before the driver has made it."""
        return (self.folder / "secret").read_bytes()

    def write(self, record: NodeRecord) -> None:
        """Write or renew a server's record."""
        write_atomic(self._nodes / f"{record.name}.json", json.dumps(asdict(record)))

    def remove(self, name: str) -> None:
        """Remove a server's record."""
        (self._nodes / f"{name}.json").unlink(missing_ok=True)

    def nodes(self) -> list[NodeRecord]:
        """Return all records that can be read."""
        found = []
        for path in sorted(self._nodes.glob("*.json")):
            record = _read(path, NodeRecord)
            if record is not None:
                found.append(record)
        return found

    def renew(self, lease: SandboxLease) -> None:
        """Write the driver's lease."""
        write_atomic(self.folder / "lease.json", json.dumps(asdict(lease)))

    def lease(self) -> SandboxLease | None:
        """Return the lease, None when there is none."""
        return _read(self.folder / "lease.json", SandboxLease)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return kind(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):  # removed, or written by another version
        return None
