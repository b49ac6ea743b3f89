"""The journal: every finished group, batch and evaluation since the last checkpoint, written before it is used.

Comes in: what happens. Goes out: after a crash, the same once more, so that a run trains again without generating
again what was finished. Together with the checkpoint it goes on from, this is the recovery of a database: state, and a
log of what came after it (Mohan et al., ARIES, TODS 1992, for the principle).

    resume    what follows on the checkpoint is read, written once more as a segment of its own, and waits (``waiting``)
    append    a record goes to the file at once: it outlives the process
    durable   it outlives the machine: one fsync for all that was appended before (group commit)
    begin     a new state is going to be saved: its events go to a segment of their own, beginning with what still waits
    compact   the state is committed: segments before the oldest one that is kept go

A segment appears under the next number as a whole, and never in place of another; what a resume found is written under
a new number as well. So an earlier attempt that is still alive writes where nobody reads any more, or its next segment
exists already and it ends. Bad storage alone never ends a run: it goes on without its journal until its next state, and
says that after a crash it would generate again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlpost.config.tree import Config
from rlpost.errors import CheckpointError, Fenced
from rlpost.files import in_daemon, sync
from rlpost.rollout.journal_format import (
    BATCH,
    EVALUATION,
    GROUP,
    Header,
    Record,
    batch_bytes,
    evaluation_bytes,
    follow,
    group_bytes,
    header_bytes,
    read_header,
    read_segment,
    segment_path,
    segments,
)
from rlpost.types import SampleGroup

logger = logging.getLogger(__name__)

FSYNC_DEADLINE_S = 60.0


class Journal:
    """Of one attempt; made by ``resume``."""

    def __init__(self, folder: Path | None, settings: str, *, next_number: int) -> None:
        self._folder, self._settings, self._next_number = folder, settings, next_number
        self._waiting: deque[Record] = deque()
        self._lent: tuple[int, bytes] = (-1, b"")  # step and record of the newest batch that was taken
        self._evaluations: dict[int, Mapping[str, float]] = {}
        self._file: int | None = None
        self._lock = asyncio.Lock()
        self._appended = self._synced = 0  # records
        self._unbroken = True
        self._spent_s = 0.0

    @classmethod
    def resume(cls, folder: Path, base: int, *, step: int, settings: str) -> Journal:
        """Go on from the checkpoint state of ``step`` steps that names segment ``base``; 0 is the beginning of a run.

        Raises CheckpointError when another attempt is writing there.
        """
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for left in folder.glob(".*.log.*"):
            left.unlink(missing_ok=True)
        there = segments(folder)
        found = follow(there, base, step, settings)
        for problem in found.problems:
            logger.warning("journal: %s", problem)
        numbers = [int(path.stem) for path in folder.glob("*.log") if path.stem.isdigit()]
        journal = cls(folder, settings, next_number=max([base - 1, *numbers]) + 1)
        journal._waiting.extend(record for record in found.records if record.kind != EVALUATION)
        evaluations = [record.meta for record in found.records if record.kind == EVALUATION]
        journal._evaluations = {each["step"]: each["metrics"] for each in evaluations}
        try:
            journal._start(base, step)
        except FileExistsError as error:
            raise CheckpointError(f"{error.filename2} was made by another attempt of this run just now") from None
        if found.records:
            kinds = [record.kind for record in found.records]
            logger.info(
                "journal: %d finished groups, %d batches and %d evaluations follow on step %d",
                *(kinds.count(kind) for kind in (GROUP, BATCH, EVALUATION)),
                step,
            )
        return journal

    @classmethod
    def off(cls) -> Journal:
        """One that writes nothing and knows nothing."""
        return cls(None, "", next_number=0)

    @property
    def num_batches(self) -> int:
        """Batches that wait to be trained once more."""
        return sum(record.kind == BATCH for record in self._waiting)

    @property
    def is_written(self) -> bool:
        """False when storage failed, until the next ``begin``."""
        return self._file is not None

    def again(self) -> Iterator[Record]:
        """Groups that finished, in order, and last the batch that was taken then; all of them when no batch follows.

        Each is given once.
        """
        while self._waiting:
            record = self._waiting.popleft()
            if record.kind == BATCH:
                self._lent = record.meta["step"], record.framed()
            yield record
            if record.kind == BATCH:
                return

    def evaluation(self, step: int) -> Mapping[str, float] | None:
        """What the evaluation of ``step`` found; None when there was none since the last checkpoint."""
        return self._evaluations.get(step)

    def finished(self, group: SampleGroup, *, wanted: bool) -> None:
        """A group is complete."""
        if self._file is not None:
            with self._timed():
                self._append(group_bytes(group, wanted=wanted))

    def batch(self, step: int, groups: Sequence[SampleGroup], counts: Mapping[str, float]) -> None:
        """The next batch was taken after ``step`` steps."""
        self._lent = step, batch_bytes(step, [group.prompt_id for group in groups], counts)
        self._append(self._lent[1])

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is complete."""
        self._evaluations[step] = metrics
        self._append(evaluation_bytes(step, metrics))

    def begin(self, step: int) -> int:
        """A state of ``step`` steps is going to be saved; returns the number it has to name.

        Raises Fenced when a newer attempt writes the journal.
        """
        if self._folder is None:
            return 0
        if self._file is not None and self._synced < self._appended:
            self._guarded(os.fsync, self._file)  # what the new segment does not repeat must not be lost with it
        number = self._next_number
        try:
            self._start(number, step)
        except FileExistsError as error:
            raise Fenced(
                f"{error.filename2} exists: another attempt of this run is writing its journal; this one ends"
            ) from None
        return number

    def compact(self, oldest_step: int) -> None:
        """No checkpoint before ``oldest_step`` is needed any more."""
        if self._folder is None:
            return
        headers = [header for path in self._folder.glob("*.log") if (header := read_header(path)) is not None]
        own = [header.number for header in headers if header.number == header.base and header.step >= oldest_step]
        for header in headers:
            if header.number < min(own, default=0):
                segment_path(self._folder, header.number).unlink(missing_ok=True)

    async def durable(self) -> None:
        """Return when all that was appended so far outlives a crash of the machine."""
        target = self._appended
        async with self._lock:
            if self._file is None or self._synced >= target:
                return
            with self._timed():
                await self._sync(self._file)

    def seconds(self) -> float:
        """What it took since the last call: of the driver's time, and of waiting for the disk."""
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
        """Nothing more is written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _start(self, base: int, step: int) -> None:
        """A new segment, with what still waits in it. Raises FileExistsError when another attempt has made it."""
        assert self._folder is not None
        self.close()
        path = segment_path(self._folder, self._next_number)
        self._next_number += 1
        header = header_bytes(Header(int(path.stem), base, step, self._settings, self._unbroken))
        lent = [record for of_step, record in [self._lent] if of_step >= step]
        self._evaluations = {at: found for at, found in self._evaluations.items() if at >= step}
        evaluations = [evaluation_bytes(at, found) for at, found in self._evaluations.items()]
        try:
            _create(path, [header, *lent, *evaluations, *(record.framed() for record in self._waiting)])
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            if self._waiting:
                copied = read_segment(path)
                assert copied is not None, path
                keys = {record.key for record in self._waiting}
                self._waiting = deque(record for record in copied.records if record.key in keys)
        except FileExistsError:
            raise
        except OSError as error:
            self._give_up(str(error))
            return
        self._unbroken = True

    def _append(self, record: bytes) -> None:
        if self._file is None:
            return
        self._appended += 1
        self._guarded(_write_all, self._file, record)

    def _guarded(self, act: Callable[..., object], *arguments: Any) -> None:
        try:
            act(*arguments)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        logger.error(
            "journal: %s is not written any more (%s); until the next checkpoint a crash means generating again",
            self._folder,
            why,
        )
        self._unbroken = False
        self.close()


_ADDED = {("grpo", "loss_unit"): "sample"}
"""Settings that came later, with the value that means what was before: a journal of an older program stays usable."""


def settings_hash(config: Config) -> str:
    """Of all settings that say what is generated and trained: with others a journal is not gone on with."""
    tables = config.model_dump(mode="json", include={"rollout", "grpo", "optimizer", "model"})
    del tables["rollout"]["num_rollout"]
    for (table, key), before in _ADDED.items():
        if tables[table][key] == before:
            del tables[table][key]
    origin = {name: getattr(config.checkpoint, name) for name in ("hf_checkpoint", "ref_load", "load")}
    text = json.dumps([tables, {name: value and str(value) for name, value in origin.items()}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _create(path: Path, records: Iterable[bytes]) -> None:
    """A file with these records, all of them or none. Raises FileExistsError when it is there already."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for record in records:
            _write_all(file, record)
        os.fsync(file)
        os.link(partial, path)  # unlike a rename it does not replace
    finally:
        os.close(file)
        partial.unlink()
    sync(path.parent)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
