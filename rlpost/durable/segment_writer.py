"""Writes one journal segment in a thread, in order, so that the event loop never waits for a disk.

Input: a header, the first records, then single records. Output: the file NUMBER.log, whose number
no other attempt has: if two attempts of a run are alive on two hosts, exactly one of them creates
the file, on any file system.

Consecutive segments share one queue, so that a segment seals the complete one before it. After a
write or fsync that fails, the file is cut back to its last synced record, and the records since
then, which stay in memory until they are synced, are written again with the next record: a disk
that was full for a while costs no record. After a missed deadline, too many pending bytes or a file
that cannot be cut back, a segment is given up: nothing more is written to it, even if the storage
answers later, and the next segment has another queue.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.files import sync, take_name, write_all
from rlpost.durable.journal_format import (
    PART,
    Framing,
    Header,
    Record,
    header_content,
    segment_path,
)
from rlpost.durable.journal_segments import Segment
from rlpost.durable.open_parts import Appended, Waiting, content_of
from rlpost.durable.run_files import RunFile
from rlpost.errors import CheckpointError, Fenced

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0
SLOWEST_BYTES_PER_S = 10e6
"""Storage that reads or copies records more slowly than this counts as hung."""
MAX_PENDING_BYTES = 4 * 2**30
"""Limit of queued records, whose samples the driver holds anyway; with routes of 89 layers and 8
experts each, it is reached by 6 million tokens.
"""
MAX_UNSYNCED_BYTES = 64 * 2**20
"""Bytes of written records in memory after which the thread syncs without being asked."""
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
RECORD_OVERHEAD_BYTES = 1024  # memory of a pending record besides its content
MAX_TAKEN = 16
LOST = "a crash before the next checkpoint would repeat generation"


def deadline_s(num_bytes: int = 0) -> float:
    """Seconds after which storage that reads or copies ``num_bytes`` counts as hung."""
    return DEADLINE_S + num_bytes / SLOWEST_BYTES_PER_S


class SegmentWriter:
    """One segment. The event loop calls its methods, a thread those that block."""

    def __init__(
        self,
        folder: Path,
        header: Header,
        *,
        check: Callable[[], None],
        is_base: bool = False,
        after: SegmentWriter | None = None,
    ) -> None:
        """
        Args:
            header: its number is increased while another file has it.
            check: raises Fenced when another attempt owns the run.
            is_base: a state begins this segment, which seals ``after`` and is its own base.
            after: the segment that this one replaces.
        """
        self.header = header
        self.copies: Sequence[Record] | None = None
        """The records still to be replayed as this segment has them; None until it is created."""
        self._folder, self._check, self._is_base, self._after = folder, check, is_base, after
        self._queue: RunFile = (
            after._queue if after is not None and after.is_written else _queue(folder)
        )
        self._file: int | None = None
        # state at the end of the file, and at the last fsync
        self._framing, self._synced_framing = Framing(), Framing()
        self._problem: str | None = None
        self._follows_a_gap = False  # records before this segment's state are lost
        self._failure: OSError | None = None  # of the last write; the next one retries
        self._first_records: tuple[Sequence[bytes], Waiting] | None = None
        """Arguments of ``create`` while the file could not be created."""
        self._syncing: Future[bool] | None = None  # by ``sync_soon``
        self._first_state = 0  # ``first_state`` of the segment before
        self._num_copied = 0  # bytes of waiting records
        self._pending: deque[tuple[bytes, Appended | None]] = deque()
        self._unsynced: deque[tuple[bytes, Appended | None]] = deque()  # since the last fsync
        # Bytes of records: queued (event loop), written and synced (thread). -1: the file is not
        # created.
        self._queued, self._written, self._synced = 0, 0, -1

    @property
    def is_written(self) -> bool:
        """False once the segment is given up."""
        return self._problem is None

    @property
    def is_durable(self) -> bool:
        """Whether all queued records are on disk."""
        return self._problem is None and self._synced == self._queued

    @property
    def lacks_space(self) -> bool:
        """Whether records wait for space on the disk."""
        failure = self._failure
        return self._problem is None and failure is not None and failure.errno in NO_SPACE

    @property
    def first_state(self) -> int:
        """The segment of the first state whose resume reaches this segment.

        Between the states before it and this segment records are lost.
        """
        return self.header.base if self._follows_a_gap else self._first_state

    def next(self, step: int | None = None) -> SegmentWriter:
        """Return the next segment, for a state of ``step`` steps or, without, the same state."""
        header = self.header if step is None else replace(self.header, step=step)
        return SegmentWriter(
            self._folder, header, check=self._check, is_base=step is not None, after=self
        )

    def create_soon(self, first: Sequence[bytes], waiting: Waiting) -> Future[bool]:
        """Queue ``create``."""
        records = (each.record if isinstance(each, Appended) else each for each in waiting)
        self._num_copied = sum(record.size for record in records if record is not None)
        return self._queue.soon(partial(self.create, first, waiting))

    async def start(self, first: Sequence[bytes], waiting: Waiting) -> None:
        """Create the file within a deadline; raises as ``create`` does."""
        await self._within_deadline(self.create_soon(first, waiting), "a new segment")

    def append(self, content: bytes, part: Appended | None = None) -> None:
        """Queue a record, which is that of ``part``."""
        if self._problem is not None:
            return
        if self._queued - self._written > MAX_PENDING_BYTES:
            self.give_up(f"more than {MAX_PENDING_BYTES // 2**20} MiB wait to be written")
            return
        self._queued += _cost(content)
        self._pending.append((content, part))
        self._queue.soon(self._write_pending)

    def sync_soon(self) -> bool:
        """Queue an fsync, unless one is queued; return whether records wait for it."""
        if self._problem is not None or self.is_durable:
            return False
        if self._syncing is None or self._syncing.done():
            self._syncing = self._queue.soon(self._sync)
        return True

    async def durable(self) -> None:
        """Return when all queued records are on disk, or a write fails or takes too long.

        Raises as ``create`` does.
        """
        if self._problem is None and not self.is_durable:
            await self._within_deadline(self._queue.soon(self._sync), "an fsync")

    def give_up(self, why: str) -> None:
        """Stop writing."""
        if self._problem is not None:
            return
        self._problem = why
        # a queue that hangs must not keep them in memory
        self._pending.clear()
        self._unsynced.clear()
        logger.error("journal: %s is no longer written (%s); %s", self._folder, why, LOST)
        self._queue.soon(self._close)

    def close(self) -> None:
        """Write pending records and close the file; blocks for a few seconds at most."""
        if self._problem is None:
            with suppress(Fenced):
                self._queue.finish(self._close)

    def create(self, first: Sequence[bytes], waiting: Waiting) -> None:
        """Create the file with ``first`` and copies of ``waiting``; blocks.

        Raises Fenced when another attempt owns the run, CheckpointError when a waiting record
        cannot be read.
        """
        if self._after is not None:
            self._replace(self._after)
            self._after = None
        last = self.header.number + MAX_TAKEN
        while self._problem is None and self.copies is None:
            path, copies = segment_path(self._folder, self.header.number), list[Record]()
            moved: list[tuple[Appended, Record]] = []
            try:
                create_file(path, self._first_frames(path, first, waiting, copies, moved))
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                self._synced, self.copies = 0, copies
                for part, record in moved:
                    part.record = record
                self._synced_framing = self._framing.copy()
            except FileExistsError:  # an older attempt that is still alive was faster
                self._check()
                if self.header.number == last:
                    self.give_up(
                        f"{path} and the {MAX_TAKEN} files before it were created by another attempt"
                    )
                self._take_next_number()
            except OSError as error:
                self._check()
                if error.errno not in NO_SPACE:
                    self.give_up(str(error))
                    return
                self._first_records = first, waiting
                self._retry_later(error)
                return
            except CheckpointError as error:
                self._check()  # a newer attempt may have deleted the records
                self.give_up(str(error))
                raise

    def _replace(self, before: SegmentWriter) -> None:
        """End the segment ``before``, and seal it if this one begins with a state."""
        before._sync()
        if before._failure is not None:
            before.give_up(str(before._failure))
        is_complete = before.is_written
        previous = self.header.previous
        if self._is_base:
            previous = before._framing.seal(before.header.number) if is_complete else None
        if is_complete:
            before._close()
        self._first_state = before.first_state
        self._follows_a_gap = self._is_base and not is_complete
        self.header = replace(
            self.header, number=before.header.number, previous=previous, unbroken=is_complete
        )
        self._take_next_number()

    def _take_next_number(self) -> None:
        number = self.header.number + 1
        self.header = replace(
            self.header, number=number, base=number if self._is_base else self.header.base
        )

    def _first_frames(
        self,
        path: Path,
        first: Sequence[bytes],
        waiting: Waiting,
        copies: list[Record],
        moved: list[tuple[Appended, Record]],
    ) -> Iterator[bytes]:
        """Yield the first frames of the file.

        Add copies of waiting records to ``copies``, and parts with their copies to ``moved``.
        """
        self._framing = framing = Framing()
        yield framing.frame(header_content(self.header))
        for content in first:
            yield framing.frame(content)
        for each in waiting:
            if isinstance(each, Appended):
                kept = content_of(each)
                if kept is not None:
                    record = each.record or Record(PART, each.meta, path, 0, 0)
                    copy, frame = _copy(record, kept, framing, path)
                    moved.append((each, copy))
                    yield frame
                continue
            answers = []
            for answer in each.answers:
                copy, frame = _copy(answer, answer.content(), framing, path)
                answers.append(copy)
                yield frame
            copy, frame = _copy(each, each.content(), framing, path)
            copies.append(replace(copy, answers=tuple(answers)))
            yield frame

    def _write_pending(self) -> None:
        self._create_again()
        while self._file is not None and self._problem is None:
            try:
                content, part = self._pending[0]
            except IndexError:  # all written, or cleared by ``give_up`` in the event loop
                return
            offset, seed = self._framing.num_bytes, self._framing.checksum
            try:
                write_all(self._file, self._framing.frame(content))
            except OSError as error:
                self._cut_back(error)
                return
            if part is not None:
                path = segment_path(self._folder, self.header.number)
                size = self._framing.num_bytes - offset
                part.record = Record(PART, part.meta, path, offset, size, seed)
            self._written += _cost(content)
            self._unsynced.append((content, part))
            with suppress(IndexError):  # the event loop may have given up
                # after the write: an unexpected error must not skip a record
                self._pending.popleft()
            if self._written - max(self._synced, 0) > MAX_UNSYNCED_BYTES:
                self._sync_written()

    def _create_again(self) -> None:
        """Create the file if there was no space for it before."""
        if self._first_records is None or self._problem is not None:
            return
        records, self._first_records = self._first_records, None
        self.create(*records)

    def _sync(self) -> None:
        self._write_pending()
        self._sync_written()

    def _sync_written(self) -> None:
        if self._problem is not None or self._file is None or self._failure_is_new():
            return
        try:
            if self._synced != self._written:
                os.fsync(self._file)
        except OSError as error:
            self._cut_back(error)
            return
        self._synced, self._synced_framing = self._written, self._framing.copy()
        self._unsynced.clear()
        if self._failure is not None:
            self._failure = None
            logger.info("journal: %s is written again", self._folder)

    def _failure_is_new(self) -> bool:
        """Whether the last write failed, so that records wait."""
        return self._failure is not None and bool(self._pending)

    def _cut_back(self, error: OSError) -> None:
        """Cut the file back to its last synced record, and queue all later records again.

        After a failed fsync the page cache may lack records that were written: they count as not
        written.
        """
        assert self._file is not None
        try:
            os.ftruncate(self._file, self._synced_framing.num_bytes)
        except OSError:
            self.give_up(str(error))
            return
        self._framing, self._written = self._synced_framing.copy(), self._synced
        self._pending.extendleft(reversed(self._unsynced))
        self._unsynced.clear()
        self._retry_later(error)

    def _retry_later(self, error: OSError) -> None:
        if self._failure is None:
            logger.error(
                "journal: %s cannot be written (%s); its records wait in memory, and each later one retries. "
                "Make room there; %s",
                *(self._folder, error, LOST),
            )
        self._failure = error

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                os.close(file)

    async def _within_deadline(self, done: Future[bool], what: str) -> None:
        seconds = deadline_s(self._num_copied if self.copies is None else 0)
        waiting = asyncio.wrap_future(done)
        await asyncio.wait([waiting], timeout=seconds)
        if waiting.done():
            waiting.result()
        else:
            self.give_up(f"{what} took more than {seconds:.0f} s")


def _queue(folder: Path) -> RunFile:
    """Return a queue of writes in order; ``append`` bounds its size in bytes."""
    return RunFile(folder, lost=LOST, max_waiting=MAX_PENDING_BYTES)


def _copy(record: Record, content: bytes, framing: Framing, path: Path) -> tuple[Record, bytes]:
    """Return a record as the file at ``path`` will have it, and its frame."""
    offset, seed = framing.num_bytes, framing.checksum
    frame = framing.frame(content)
    return replace(record, path=path, offset=offset, size=len(frame), seed=seed), frame


def _cost(content: bytes) -> int:
    """Bytes of a pending record in memory."""
    return len(content) + RECORD_OVERHEAD_BYTES


def make_folder(folder: Path) -> None:
    """Create the folder of the journal and remove temporary files of earlier attempts.

    A storage failure is only logged; creating the first segment reports it again.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        sync(folder.parent)  # otherwise a host crash may lose the folder with its synced content
        for left in folder.glob(".*.log.*"):
            left.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("journal: %s", error)


def create_file(path: Path, records: Iterable[bytes]) -> None:
    """Create a file with these records atomically. Raises FileExistsError when it exists.

    Without hard links, a crash may leave an empty file: a segment without records, which ends the
    chain.
    """
    temporary = _temporary_path(path)
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for record in records:
                write_all(file, record)
            os.fsync(file)
        finally:
            os.close(file)
        if not take_name(temporary, path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _temporary_path(path: Path) -> Path:
    """Return a random temporary name: process ids are not unique on a shared file system."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    return path.with_name(f".{path.name}.{host}.{os.getpid()}.{secrets.token_hex(4)}")


def delete_superseded(
    segments: Iterable[Segment], chain: Sequence[Segment], check: Callable[[], None]
) -> None:
    """Delete the segments that a resume from the state of ``chain`` has copied to a new one.

    Otherwise N restarts without a commit would keep N copies. The new segment continues the state
    before as they did, so checkpoints of earlier states do not need them. Raises Fenced when another
    attempt owns the run.
    """
    if not chain:
        return
    check()
    copied = chain[0].header
    for segment in segments:
        header = segment.header
        is_of_state = (header.base, header.step) == (copied.base, copied.step)
        if is_of_state and header.number <= copied.number:
            try:
                segment.path.unlink(missing_ok=True)
            except OSError as error:  # the next resume deletes it
                logger.warning("journal: %s is not needed and not deleted: %s", segment.path, error)
