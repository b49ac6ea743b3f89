"""Reads journal segments: the valid records of files, and why the rest is invalid.

A crash truncates a segment anywhere: reading ends before the first record that is incomplete or
damaged. A damaged PART costs that part alone, if the next record continues its checksum and kind.
Segments of format 3 (rlpost 0.2) are read, those of formats 1 and 2 (rlpost 0.1) are not.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from rlpost.durable.journal_format import (
    FORMAT,
    FRAME,
    GROUP,
    HEADER,
    OLDEST_FORMAT,
    PART,
    Framing,
    Header,
    Record,
    Seal,
    json_text,
    segment_path,
    unreadable_words,
)
from rlpost.durable.run_files import read_again
from rlpost.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segment:
    """One file: its valid records in order, the number of valid bytes, the problem of the rest.

    ``digests`` has the digest up to the end of each record, by that offset (see ``Seal``).
    ``damaged`` names records that are left out before the valid end.
    """

    path: Path
    header: Header
    records: tuple[Record, ...]
    good_bytes: int
    problem: str | None
    digests: Mapping[int, str]
    damaged: tuple[str, ...] = ()

    def sealed(self, seal: Seal) -> bool:
        """Whether it still begins with the bytes that ``seal`` describes."""
        return seal.number == self.header.number and self.digests.get(seal.num_bytes) == seal.digest


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file without a valid header, or with an ``earlier`` format, and its problem."""

    path: Path
    problem: str
    num_bytes: int  # size of the file
    earlier: bool = False

    @property
    def number(self) -> int:
        """The segment number in the file's name."""
        return int(self.path.stem)


def segment_paths(folder: Path) -> list[Path]:
    """List all segments of a journal by number, valid or not.

    Raises OSError when it still cannot be listed after retries.
    """

    def list_names() -> list[str]:
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []

    names = read_again(list_names)
    paths = [
        folder / name
        for name in names
        if name.endswith(".log") and name.removesuffix(".log").isdecimal()
    ]
    return sorted(paths, key=lambda path: int(path.stem))


def read_segment(path: Path) -> Segment | Unreadable:
    """Read a segment up to its first invalid record.

    Raises CheckpointError when it still cannot be read after retries: that is not damage.
    """
    try:
        return read_again(lambda: _read_segment(path))
    except FileNotFoundError:  # an older attempt that is still alive has deleted it
        return Unreadable(path, "it was deleted after the folder was listed", 0)
    except OSError as error:
        raise CheckpointError(unreadable_words(path, error)) from error


def read_header(path: Path) -> Header | None:
    """Read the header of a segment; None when it is invalid.

    Raises OSError when it still cannot be read after retries.
    """

    def read() -> memoryview | None:
        with open(path, "rb") as file:
            return _next_frame(file, Framing(), seed=0)

    try:
        frame = read_again(read)
        return None if frame is None else _header(frame, path)
    except _Damage:
        return None


def delete_before(folder: Path, oldest_step: int) -> None:
    """Delete segments that only checkpoints before ``oldest_step`` need.

    While a header cannot be read none is deleted; the next commit tries again.
    """
    try:
        paths = segment_paths(folder)
        headers = [header for path in paths if (header := read_header(path)) is not None]
        bases = [header.base for header in headers if header.step >= oldest_step]
        for path in paths:
            if int(path.stem) < min(bases, default=0):
                path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("journal: old segments in %s are not deleted yet: %s", folder, error)


class _Damage(Exception):
    """The rest of a segment is invalid."""


class _Earlier(_Damage):
    """The segment has a format of an earlier version."""


class _BadBody(_Damage):
    """A record does not match the ``checksum`` of its frame."""

    def __init__(self, problem: str, framed: bytes, checksum: int) -> None:
        super().__init__(problem)
        self.framed, self.checksum = framed, checksum
        self.kind = framed[FRAME.size]


def _read_segment(path: Path) -> Segment | Unreadable:
    """Read a segment once. Raises OSError."""
    reading = _Reading(path)
    problem, size, earlier = None, 0, False
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            reading.read(file)
    except _Damage as damage:
        problem, earlier = str(damage), isinstance(damage, _Earlier)
    if reading.header is None:
        return Unreadable(path, problem or "it is empty", size, earlier)
    return Segment(
        path,
        reading.header,
        tuple(reading.records),
        max(reading.digests),
        problem,
        reading.digests,
        tuple(reading.damaged),
    )


class _Reading:
    """Reads the records of one segment, until its end or the first invalid one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.framing = Framing()
        self.header: Header | None = None
        self.records: list[Record] = []
        self.digests: dict[int, str] = {}
        self.damaged: list[str] = []

    def read(self, file: BinaryIO) -> None:
        """Read ``file`` from its start. Raises _Damage, OSError."""
        pending: _BadBody | None = (
            None  # a damaged record, until the next one shows that its frame is intact
        )
        while True:
            offset, seed = self.framing.num_bytes, self.framing.checksum
            try:
                content = _next_frame(file, self.framing, seed=seed)
            except _BadBody as damage:
                if pending is not None or damage.kind != PART:
                    raise pending or damage from None
                pending = damage
                self.framing.count_record(damage.framed, damage.checksum)
                continue
            except _Damage as damage:
                raise pending or damage from None
            if content is None:
                if pending is not None:
                    raise pending
                return
            if pending is not None:
                self.damaged.append(f"{pending}; it is left out")
                pending = None
            self._add(content, offset, seed)

    def _add(self, content: memoryview, offset: int, seed: int) -> None:
        if self.header is None:
            self.header = _header(content, self._path)
            if self.header.format == OLDEST_FORMAT:
                self.framing = Framing(written_format=OLDEST_FORMAT)
                self.framing.frame(bytes(content))
        else:
            size = self.framing.num_bytes - offset
            meta = _meta(content, offset)
            self.records.append(Record(content[0], meta, self._path, offset, size, seed))
        self.digests[self.framing.num_bytes] = self.framing.digest()


def _next_frame(file: BinaryIO, framing: Framing, *, seed: int) -> memoryview | None:
    """Read kind and body of the next record, whose checksum continues ``seed``.

    Returns None at the end. Raises _Damage.
    """
    offset = framing.num_bytes
    head = file.read(FRAME.size)
    if not head:
        return None
    length, checksum = FRAME.unpack(head) if len(head) == FRAME.size else (0, 0)
    content = file.read(length)
    if len(head) < FRAME.size or len(content) < length:
        torn = len(head) + len(content)
        raise _Damage(f"the last {torn} bytes, starting at {offset}, are an incomplete record")
    if length == 0:
        raise _Damage(f"the record at byte {offset} is damaged")
    if zlib.crc32(content, seed) != checksum:
        raise _BadBody(f"the record at byte {offset} is damaged", head + content, checksum)
    framing.count_record(head + content, checksum)
    return memoryview(content)


def _header(content: memoryview, path: Path) -> Header:
    """The header in the first record of the file at ``path``. Raises _Damage."""
    if content[0] != HEADER:
        raise _Damage("its first record is not a header")
    raw = _parsed(content[1:], 0)
    known = {field.name for field in fields(Header)}
    written = raw.get("format", 1)
    if written < OLDEST_FORMAT:
        raise _Earlier(f"it has format {written}, and this version reads format {OLDEST_FORMAT}")
    if written > FORMAT or not raw.keys() <= known:
        raise _Damage("it was written by a newer version of rlpost")
    seal = raw.get("previous")
    try:
        header = Header(**{**raw, "previous": None if seal is None else Seal(**seal)})
    except TypeError as error:
        raise _Damage(f"its header is malformed: {error}") from None
    if segment_path(path.parent, header.number).name != path.name:
        raise _Damage(f"it is a copy of segment {header.number}")
    return header


def _meta(content: memoryview, offset: int) -> dict[str, object]:
    """The JSON part of a record at ``offset``, without answers. Raises _Damage."""
    if content[0] not in (GROUP, PART):
        return _parsed(content[1:], offset)
    meta = _parsed(memoryview(json_text(content[1:])), offset)
    meta.pop("body", None)
    group = meta.pop("group", None)
    if content[0] == PART or "newest_version" in meta:
        return meta
    samples = [scored["sample"] for scored in group["samples"]]  # format 3
    spans = [sample.get("version_spans") or [[sample["policy_version"], 0]] for sample in samples]
    versions = [version for each in spans for version, _ in each]
    return meta | {
        "oldest_version": min(versions, default=0),
        "newest_version": max(versions, default=0),
    }


def _parsed(text: memoryview, offset: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(bytes(text))
    except ValueError as error:
        raise _Damage(f"the record at byte {offset} is malformed: {error}") from None
    return found
