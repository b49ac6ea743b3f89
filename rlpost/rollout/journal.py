"""The journal: a write-ahead log of finished groups, batches and evaluations since the last checkpoint.

Input: events. Output: the same events after a crash, so that a run trains again without generating finished groups
again. Checkpoint and journal together work as the recovery of a database does: a state, and a log of what followed it
(the principle of ARIES, Mohan et al., TODS 1992).

    resume    read the records that provably follow the checkpoint, copy them to a new segment, keep them for replay
    end_at    replay only up to a given record (``rlpost.rollout.replay`` found that the next one does not match)
    append    write a record to the file at once: it survives a crash of the process
    durable   fsync all records appended so far (group commit): they survive a crash of the machine
    begin     before a new state is saved: start a new segment for later events, with the records still to be replayed
    compact   after the state is committed: delete segments older than the oldest one that is kept

A segment appears under the next number as a whole and never replaces another; a resume, too, writes to a new number. An
earlier attempt that is still alive therefore writes to segments that are no longer read, or ends because its next
segment exists already. Each header seals the previous segment (``journal_chain``). A storage failure alone never ends a
run: it continues without a journal until the next checkpoint, and logs that a crash would repeat generation.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlpost.config.tree import Config
from rlpost.daemon_threads import in_daemon
from rlpost.errors import CheckpointError, Fenced
from rlpost.rollout.journal_chain import contents, follow, read_folder
from rlpost.rollout.journal_format import (
    BATCH,
    EVALUATION,
    FORMAT,
    GROUP,
    Framing,
    Header,
    Record,
    Seal,
    batch_content,
    evaluation_content,
    group_content,
    header_content,
    read_header,
    segment_path,
    segment_paths,
)
from rlpost.rollout.segment_file import create, make_folder, write_all
from rlpost.types import Prompt, SampleGroup

logger = logging.getLogger(__name__)

FSYNC_DEADLINE_S = 60.0


class Journal:
    """The journal of one attempt; create it with ``resume``."""

    def __init__(self, folder: Path | None, settings: str, *, data: str | None = None, next_number: int) -> None:
        self._folder, self._settings, self._data, self._next_number = folder, settings, data, next_number
        self._waiting: deque[Record] = deque()
        self._newest_batch: tuple[int, bytes] = (-1, b"")  # step and record of the newest batch that was taken
        self._evaluations: dict[int, Mapping[str, float]] = {}
        self._file: int | None = None
        self._header: Header | None = None  # of the segment that is written
        self._framing = Framing()
        self._lock = asyncio.Lock()
        self._appended = self._synced = 0  # records
        self._unbroken = True
        self._held: list[bytes] | None = None  # records appended while a new segment is created
        self._spent_s = 0.0

    @classmethod
    def resume(cls, folder: Path, base: int, *, step: int, settings: str, data: str | None = None) -> Journal:
        """Continue from the checkpoint state of ``step`` steps that names segment ``base``; 0 is the start of a run.

        ``data`` is a fingerprint of the prompt files. Raises CheckpointError when another attempt is writing there, or
        the folder cannot be listed.
        """
        make_folder(folder)
        try:
            there, unreadable = read_folder(folder)
            numbers = [int(path.stem) for path in segment_paths(folder)]
        except OSError as error:
            raise CheckpointError(f"the journal in {folder} cannot be listed: {error}; repair the storage") from error
        found = follow(there, base, step, settings, data=data, unreadable=unreadable)
        for problem in found.problems:
            logger.warning("journal: %s", problem)
        journal = cls(folder, settings, data=data, next_number=max([base - 1, *numbers]) + 1)
        journal._waiting.extend(record for record in found.records if record.kind != EVALUATION)
        evaluations = [record.meta for record in found.records if record.kind == EVALUATION]
        journal._evaluations = {each["step"]: each["metrics"] for each in evaluations}
        journal._start_again(base, step, found.previous)
        if found.records:
            kinds = [record.kind for record in found.records]
            logger.info(
                "journal: %d finished groups, %d batches and %d evaluations follow step %d",
                *(kinds.count(kind) for kind in (GROUP, BATCH, EVALUATION)),
                step,
            )
        return journal

    @classmethod
    def off(cls) -> Journal:
        """A journal that writes nothing and holds no records."""
        return cls(None, "", next_number=0)

    @property
    def num_batches(self) -> int:
        """Number of batches still to be replayed."""
        return sum(record.kind == BATCH for record in self._waiting)

    @property
    def is_written(self) -> bool:
        """False when storage failed, until the next ``begin``."""
        return self._file is not None

    @property
    def waiting(self) -> Sequence[Record]:
        """All records still to be replayed by ``again``."""
        return tuple(self._waiting)

    def end_at(self, position: int, *, step: int, why: str | None) -> None:
        """Replay only the first ``position`` of the ``waiting`` records, which bring the run to ``step``.

        ``why`` says what is wrong with the next record. The first ``position`` records are copied to a new segment, so
        that later events follow the last of them. Raises CheckpointError when another attempt writes the journal.
        """
        lost, later = self.waiting[position:], [at for at in self._evaluations if at > step]
        for at in later:
            logger.warning("journal: the evaluation of step %d is repeated: batches before it are lost", at)
            del self._evaluations[at]
        if lost:
            logger.warning(
                "journal: %s, record at byte %d: %s; it and later records are ignored. To generate again: %s",
                *(lost[0].path, lost[0].offset, why, contents(lost)),
            )
        if lost or later:
            self._waiting = deque(self.waiting[:position])
            assert self._header is not None, "what waits was read from a journal"
            self._start_again(self._header.base, self._header.step, self._header.previous)

    def again(self) -> Iterator[Record]:
        """Yield finished groups in order up to and including the next batch, or all when no batch follows.

        Each record is yielded once. Raises CheckpointError for a batch that became unreadable.
        """
        while self._waiting:
            record = self._waiting.popleft()
            if record.kind == BATCH:
                self._newest_batch = record.meta["step"], record.content()
            yield record
            if record.kind == BATCH:
                return

    def evaluation(self, step: int) -> Mapping[str, float] | None:
        """Return the metrics of the evaluation of ``step``; None if none is recorded since the checkpoint."""
        return self._evaluations.get(step)

    def finished(self, group: SampleGroup, *, wanted: bool, prompt: Prompt | None = None) -> None:
        """Append a complete group, the answers to ``prompt``."""
        if self._file is not None or self._held is not None:
            with self._timed():
                self._append(group_content(group, wanted=wanted, prompt=prompt))

    def batch(
        self, step: int, groups: Sequence[SampleGroup], counts: Mapping[str, float], *, newest_id: int | None = None
    ) -> None:
        """Append the batch taken after ``step`` steps; ``newest_id``: the newest prompt fetched by then."""
        self._newest_batch = step, batch_content(step, [group.prompt_id for group in groups], counts, newest_id)
        self._append(self._newest_batch[1])

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a complete evaluation."""
        self._evaluations[step] = metrics
        self._append(evaluation_content(step, metrics))

    def begin(self, step: int) -> int:
        """Start a segment for a state of ``step`` steps that will be saved; return the segment's number.

        The state must name that number.
        Raises Fenced when a newer attempt writes the journal.
        """
        if self._folder is None:
            return 0
        if self._file is not None and self._synced < self._appended:
            self._guarded(os.fsync, self._file)  # the new segment does not repeat these records
        number, previous = self._next_number, None
        if self._file is not None and self._header is not None:
            previous = self._framing.seal(self._header.number)
        try:
            self._start(number, step, previous)
        except FileExistsError as error:
            raise Fenced(
                f"{error.filename2} exists: another attempt of this run is writing its journal; this one ends"
            ) from None
        return number

    async def begin_off_loop(self, step: int) -> int:
        """Run ``begin`` in a thread, within FSYNC_DEADLINE_S. Later events go to the new segment."""
        if self._folder is None:
            return 0
        async with self._lock:
            attempt = copy.copy(self)  # a hung thread must not change this object later
            attempt._waiting = deque(self._waiting)
            number, self._held = self._next_number, []
            self._next_number += 1
            try:
                async with asyncio.timeout(FSYNC_DEADLINE_S):
                    await in_daemon(partial(attempt.begin, step))
            except TimeoutError:
                self._file = None  # the thread closes the file
                self._give_up(f"a new segment took more than {FSYNC_DEADLINE_S:.0f} s")
            except BaseException:  # also cancellation: the thread may close the file at any moment
                self._file, self._unbroken = None, False
                raise
            else:
                self._file, self._header, self._framing = attempt._file, attempt._header, attempt._framing
                self._waiting, self._evaluations = attempt._waiting, attempt._evaluations
                self._unbroken, self._synced = attempt._unbroken, self._appended
            finally:
                held, self._held = self._held, None
            for content in held:
                self._append(content)
        return number

    def compact(self, oldest_step: int) -> None:
        """Delete segments that only checkpoints before ``oldest_step`` need."""
        if self._folder is None:
            return
        paths = segment_paths(self._folder)
        headers = [header for path in paths if (header := read_header(path)) is not None]
        oldest = min((header.base for header in headers if header.step >= oldest_step), default=0)
        for path in paths:
            if int(path.stem) < oldest:
                path.unlink(missing_ok=True)

    async def durable(self) -> None:
        """Return when all records appended so far survive a crash of the machine."""
        target = self._appended
        async with self._lock:
            if self._file is None or self._synced >= target:
                return
            with self._timed():
                await self._sync(self._file)

    def seconds(self) -> float:
        """Return the seconds spent since the last call, on the CPU and waiting for the disk."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    async def _sync(self, file: int) -> None:
        reached = self._appended
        try:
            async with asyncio.timeout(FSYNC_DEADLINE_S):
                await in_daemon(partial(os.fsync, file))
        except TimeoutError:
            self._give_up(f"an fsync took more than {FSYNC_DEADLINE_S:.0f} s")
        except OSError as error:
            self._give_up(str(error))
        self._synced = reached

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._spent_s += time.monotonic() - started

    def close(self) -> None:
        """Close the file; later records are not written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _start_again(self, base: int, step: int, previous: Seal | None) -> None:
        """Start the segment of a resume. Raises CheckpointError when another attempt has created it."""
        try:
            self._start(base, step, previous)
        except FileExistsError as error:
            raise CheckpointError(f"{error.filename2} was just created by another attempt of this run") from None

    def _start(self, base: int, step: int, previous: Seal | None) -> None:
        """Start a segment with the records still to be replayed. Raises FileExistsError when it exists."""
        assert self._folder is not None
        self.close()
        path = segment_path(self._folder, self._next_number)
        self._next_number += 1
        self._evaluations = {at: found for at, found in self._evaluations.items() if at >= step}
        self._header = Header(
            number=int(path.stem),
            base=base,
            step=step,
            settings=self._settings,
            unbroken=self._unbroken,
            format=FORMAT,
            data=self._data,
            previous=previous,
        )
        self._framing = Framing()
        copies: list[Record] = []
        try:
            create(path, self._first_frames(path, self._header, copies))
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileExistsError:
            raise
        except OSError as error:
            self._give_up(str(error))
            return
        self._waiting = deque(copies)
        self._unbroken = True

    def _first_frames(self, path: Path, header: Header, copies: list[Record]) -> Iterator[bytes]:
        """Yield the first frames of a new segment at ``path``; add copies of waiting records to ``copies``."""
        framing = self._framing
        yield framing.frame(header_content(header))
        of_step, batch = self._newest_batch
        if of_step >= header.step:
            yield framing.frame(batch)
        for at, metrics in self._evaluations.items():
            yield framing.frame(evaluation_content(at, metrics))
        for record in self._waiting:
            offset, seed = framing.num_bytes, framing.checksum
            frame = framing.frame(record.content())
            copies.append(replace(record, path=path, offset=offset, size=len(frame), seed=seed))
            yield frame

    def _append(self, content: bytes) -> None:
        if self._held is not None:
            self._held.append(content)
            return
        if self._file is None:
            return
        self._appended += 1
        self._guarded(write_all, self._file, self._framing.frame(content))

    def _guarded(self, act: Callable[..., object], *arguments: Any) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        logger.error(
            "journal: %s is no longer written (%s); a crash before the next checkpoint would repeat generation",
            self._folder,
            why,
        )
        self._unbroken = False
        self.close()


_ADDED = {("grpo", "loss_unit"): "sample"}
"""Settings added later, with their former behaviour as value, so that older journals stay usable."""


def settings_hash(config: Config) -> str:
    """Hash all settings that decide what is generated and trained; a journal resumes only with equal ones."""
    tables = config.model_dump(mode="json", include={"rollout", "grpo", "optimizer", "model"})
    del tables["rollout"]["num_rollout"]
    for (table, key), before in _ADDED.items():
        if tables[table][key] == before:
            del tables[table][key]
    origin = {name: getattr(config.checkpoint, name) for name in ("hf_checkpoint", "ref_load", "load")}
    text = json.dumps([tables, {name: value and str(value) for name, value in origin.items()}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
