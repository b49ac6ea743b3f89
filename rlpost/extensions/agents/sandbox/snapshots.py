"""Snapshots of a folder of a sandbox: their types, and their stream format (``inner.files``).

Received entries are checked again: names and targets of links must stay inside the folder.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rlpost.errors import RlpostError
from rlpost.extensions.agents.sandbox.inner.files import leads_outside


@dataclass(frozen=True)
class SnapshotEntry:
    """A file, folder or symbolic link of a snapshot. A link's target is relative and inside."""

    path: str
    """Relative to the folder of the snapshot, with ``/``; contains no ``..``."""
    kind: Literal["file", "folder", "link"]
    data: bytes = b""
    """Content of a file, target of a link."""
    executable: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A copy of a folder of a sandbox, taken after all processes of the agent had ended.

    Hard links are separate files here.
    """

    entries: tuple[SnapshotEntry, ...] = ()
    refused: tuple[str, ...] = ()
    """Omitted entries with reasons: special files, links that lead outside, unreadable files."""

    def files(self) -> dict[str, bytes]:
        """Return the content of each regular file by its path."""
        return {entry.path: entry.data for entry in self.entries if entry.kind == "file"}


class SnapshotRefused(RlpostError):
    """The folder exceeds the limits of a snapshot: the agent's failure, which scores 0."""


def decode(data: bytes) -> Snapshot:
    """Return the snapshot of a stream. Raises ``SnapshotRefused`` when it is damaged."""
    entries: list[SnapshotEntry] = []
    refused: list[str] = []
    position = 0
    try:
        while True:
            (length,) = struct.unpack_from(">I", data, position)
            position += 4
            if length == 0:
                return Snapshot(tuple(entries), tuple(refused))
            header = json.loads(data[position : position + length])
            position += length
            if header["size"] < 0:
                raise ValueError("negative size")
            content = data[position : position + header["size"]]
            position += header["size"]
            if header["kind"] == "refused":
                refused.append(f"{header['path']}: {header['reason']}")
            else:
                entries.append(_entry(header, content))
    except (struct.error, KeyError, TypeError, ValueError, RecursionError) as error:
        raise SnapshotRefused(f"the copy of the folder is damaged: {error}") from None


def _entry(header: dict[str, Any], content: bytes) -> SnapshotEntry:
    if len(content) != header["size"]:
        raise ValueError("incomplete entry")
    entry = SnapshotEntry(
        str(header["path"]), header["kind"], content, bool(header.get("executable", False))
    )
    check_entry(entry)
    return entry


def check_entry(entry: SnapshotEntry) -> None:
    """Raise ``SnapshotRefused`` for a path or a target that leads outside."""
    parts = entry.path.split("/")
    if not all(part not in ("", ".", "..") and "\0" not in part for part in parts):
        raise SnapshotRefused(f"path {entry.path!r} of a snapshot must be relative and inside")
    if entry.kind not in ("file", "folder", "link"):
        raise SnapshotRefused(f"{entry.path!r} is a {entry.kind}")
    if entry.kind == "link":
        target = entry.data.decode()
        if leads_outside(entry.path, target):
            raise SnapshotRefused(f"link {entry.path!r} -> {target!r} leads outside")


def encode(entries: Iterable[SnapshotEntry]) -> bytes:
    """Return the stream of entries that ``restore`` reads. Raises ``SnapshotRefused``."""
    parts = []
    for entry in entries:
        check_entry(entry)
        header = {"path": entry.path, "kind": entry.kind, "executable": entry.executable}
        head = json.dumps(header | {"size": len(entry.data)}).encode()
        parts += [struct.pack(">I", len(head)), head, entry.data]
    parts.append(struct.pack(">I", 0))
    return b"".join(parts)
