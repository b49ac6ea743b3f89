"""A folder of file contents, each named by its SHA-256 digest and written once.

    ab/abcdef...    0600, in folders 0700; written beside, fsynced, renamed

A content that exists is used again, so equal files of all episodes share one. Its mtime is the time
of its last use, renewed at most every ``keep_s`` / 4. Two rules delete contents:

    ``sweep_unused``    no save or restore used it for ``keep_s`` seconds, during all of which this
                        process ran: a run that waited longer for its nodes loses nothing
    ``sweep_except``    it is not among those that are needed, and this process has not used it

Both compare times of the file system with each other, never with this node's clock. An episode
whose content is missing begins again, so a wrong deletion costs time and no result.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from common.files import discard, sync, write_all
from rlpost.errors import RlpostError

GIB = 1 << 30
KEEP_S = 6 * 3600.0
DIGEST_CHARACTERS = 64


class StoreFull(RlpostError):
    """The contents would exceed the bound of the store."""


class ContentMissing(RlpostError):
    """A content was deleted, or its file is damaged."""


class ContentStore:
    """Stores contents in a folder. Methods block and may be called from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = 64 * GIB,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            max_bytes: of all contents; ``add`` raises StoreFull instead of exceeding it.
            keep_s: seconds for which a content is kept after its last use.
        """
        self.folder, self.max_bytes, self.keep_s = folder, max_bytes, keep_s
        self._clock, self._opened = clock, clock()
        self._swept = self._opened
        self._used: dict[str, float] = {}
        self._bytes: int | None = None
        self._lock = threading.Lock()

    def add(self, contents: Mapping[str, bytes]) -> None:
        """Write contents by digest. Raises StoreFull and OSError."""
        missing = self.missing(contents)
        beside: dict[str, Path] = {}
        try:
            self._reserve(sum(len(contents[digest]) for digest in missing))
            for digest in missing:
                path = self._path(digest)
                _make_private(path.parent)
                beside[digest] = path.with_name(f".{digest}.{secrets.token_hex(6)}")
                _write(beside[digest], contents[digest])
            for path in beside.values():
                sync(path)
            for digest in missing:
                self._publish(beside[digest], digest)
        except BaseException:
            for path in beside.values():
                discard(path)
            self._bytes = None  # counted again
            raise
        for parent in {path.parent for path in beside.values()}:
            sync(parent)
        if self._clock() - self._swept > self.keep_s / 4:
            self.sweep_unused()

    def _publish(self, beside: Path, digest: str) -> None:
        path = self._path(digest)
        with self._lock:
            if path.exists() and self._bytes is not None:  # another save was faster
                self._bytes -= path.stat().st_size
            os.replace(beside, path)
            self._used[digest] = self._clock()

    def missing(self, digests: Collection[str]) -> list[str]:
        """Return the digests without a content; the others count as used now."""
        now, lost = self._clock(), []
        for digest in digests:
            used = self._used.get(digest)
            if used is not None and now - used < self.keep_s / 4:
                continue
            with self._lock:
                try:
                    os.utime(self._path(digest))
                except FileNotFoundError:
                    lost.append(digest)
                self._used[digest] = now
        for digest in lost:
            self._used.pop(digest, None)
        return lost

    def read(self, digest: str) -> bytes:
        """Return a content. Raises ContentMissing; a damaged file is deleted."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ContentMissing(f"{path}: {error.strerror}") from error
        if digest_of(data) != digest:
            with self._lock:
                self._used.pop(digest, None)
                discard(path)
            raise ContentMissing(
                f"{path}: its {len(data)} bytes do not have the digest of its name"
            )
        self.missing([digest])
        return data

    def sweep_unused(self) -> int:
        """Delete contents by their last use; return how many bytes they had."""
        self._swept = self._clock()
        if self._swept - self._opened < self.keep_s:
            return 0
        return self._sweep(frozenset(), self.keep_s)

    def sweep_except(self, needed: Collection[str]) -> int:
        """Delete contents that are not ``needed``; return how many bytes they had.

        Call it before this process begins an episode: after that, contents are needed that no
        record names yet. Those that this process used are kept.
        """
        return self._sweep(frozenset(needed), 0.0)

    def _sweep(self, needed: Collection[str], age_s: float) -> int:
        if not self.folder.is_dir():
            return 0
        now, freed = self._file_system_time(), 0
        for path, status in self._files():
            is_unfinished = path.name[0] == "."  # of a write that may still go on
            youngest = self.keep_s if is_unfinished else age_s
            with self._lock:
                used = self._used.get(path.name)
                is_used = used is not None and (not age_s or self._clock() - used < self.keep_s)
                if is_used or path.name in needed or now - status.st_mtime < youngest:
                    continue
                self._used.pop(path.name, None)
                discard(path)
                freed += status.st_size
                if self._bytes is not None and not is_unfinished:
                    self._bytes -= status.st_size
        return freed

    def _file_system_time(self) -> float:
        """Return now, by the clock that gives files their times."""
        probe = self.folder / f".time.{secrets.token_hex(6)}"
        try:
            _write(probe, b"")
            return probe.stat().st_mtime
        finally:
            discard(probe)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for part in sorted(self.folder.glob("??")):
            for path in part.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.stat()

    def _reserve(self, size: int) -> None:
        with self._lock:
            if self._bytes is None:
                self._bytes = sum(
                    status.st_size for path, status in self._files() if path.name[0] != "."
                )
            if self._bytes + size > self.max_bytes:
                raise StoreFull(
                    f"{self.folder} holds {self._bytes / GIB:.1f} GiB of saved sandboxes, and {size} "
                    f"bytes more would exceed its bound of {self.max_bytes / GIB:.1f} GiB; contents "
                    f"that no episode uses are deleted after {self.keep_s / 3600:.0f} h"
                )
            self._bytes += size

    def _path(self, digest: str) -> Path:
        if len(digest) != DIGEST_CHARACTERS or not digest.isalnum():
            raise ContentMissing(f"{digest!r} is not a digest")
        return self.folder / digest[:2] / digest


def digest_of(data: bytes) -> str:
    """Return the name of a content."""
    return hashlib.sha256(data).hexdigest()


def _make_private(folder: Path) -> None:
    """Create a folder and those above it, as far as they are missing, with mode 0700."""
    if folder.is_dir():
        return
    _make_private(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        sync(folder.parent)


def _write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(handle, data)
    finally:
        os.close(handle)
