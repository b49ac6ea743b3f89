"""The journal: a write-ahead log of groups, batches and evaluations since the last checkpoint.

Input: events. Output: the same events after a crash, so that a run trains again without generating
finished groups again. Checkpoint and journal together work as the recovery of a database does: a
state, and a log of the events after it (the principle of ARIES, Mohan et al., TODS 1992).

    resume    read the records that provably follow the checkpoint, copy them to a new segment, keep them for replay
    end_at    replay only up to a given record (``rlpost.rollout.replay`` found that the next one does not match)
    parts     what groups in generation have so far: answers, turns. A new segment copies those of unfinished groups
    append    queue a record, before anything uses the event; a thread writes the queue to the file, in order
    durable   wait until all records appended so far are written and synced: they survive a crash of the machine
    begin     before a new state is saved: start a new segment for later events, with the records still to be replayed
    compact   after the state is committed: delete segments older than the oldest one that is kept

If a crash loses a record from the queue, its event did not happen and is generated again. Anything
that must not happen twice waits for ``durable``: a batch is trained, and a state is saved, only
after it.

A segment appears under the next free number as a whole and never replaces another; a resume, too,
writes to a new number. An earlier attempt that is still alive therefore writes to segments that are
no longer read. If it takes a number first, the attempt that owns the run takes the next one; the
other one ends. Each header seals the previous segment (``journal_chain``). A storage failure alone
never ends a run: it continues without a journal until the next checkpoint, and logs that a crash
would repeat generation (``segment_writer``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlpost.durable.journal_chain import contents
from rlpost.durable.journal_format import (
    ANSWER,
    BATCH,
    BEGUN,
    EVALUATION,
    GROUP,
    REWARD,
    STATE,
    TURN,
    Part,
    Record,
    batch_content,
    dropped_content,
    evaluation_content,
    group_content,
    part_content,
    part_meta,
)
from rlpost.durable.journal_reads import read_all, read_tail, read_within, valid_parts, with_rewards
from rlpost.durable.journal_segments import delete_before
from rlpost.durable.open_parts import Appended, Kept, OpenParts, Waiting
from rlpost.durable.segment_writer import SegmentWriter, delete_superseded, make_folder
from rlpost.durable.trained_batches import JournalBatches
from rlpost.errors import CheckpointError
from rlpost.types import Prompt, Sample, SampleGroup

logger = logging.getLogger(__name__)

SYNC_AFTER_S = 0.25
"""Seconds from a record to its fsync, of the 0.5 s that the documentation promises."""


class Journal:
    """The journal of one attempt; create it with ``open``."""

    def __init__(self, folder: Path | None, segment: SegmentWriter | None) -> None:
        self._folder, self._segment = folder, segment
        self._waiting: deque[Record] = deque()
        self._parts = OpenParts[Appended]()
        # The samples of finished answers, by prompt and index: a group refers to them.
        self._answers: defaultdict[int, dict[int, Sequence[Sample]]] = defaultdict(dict)
        self._newest_batch = (-1, b"")  # step and record of the newest batch that was taken
        self._evaluations: dict[int, Mapping[str, float]] = {}
        self._spent_s = 0.0
        self.changes: Sequence[str] = ()
        """Changed settings that decide results, one a line."""
        self.newest_usable: int | None = None
        """The newest policy version whose tokens can be used; None if all can."""
        self._committed = 0  # the segment that the newest committed state names
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @classmethod
    async def open(cls, folder: Path, resume: Callable[[], Journal]) -> Journal:
        """Return ``resume()``, run in a thread with a deadline.

        ``resume`` calls ``Journal.resume`` for ``folder``. Raises CheckpointError as that does, and
        when the deadline is missed.
        """
        return await read_all(folder, resume, f"the journal in {folder} was not read and continued")

    @classmethod
    def resume(
        cls,
        folder: Path,
        base: int,
        *,
        step: int,
        settings: str,
        data: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Journal:
        """Continue from the checkpoint state of ``step`` steps that names segment ``base``.

        ``base`` 0 is the start of a run. ``data`` is a fingerprint of the prompt files; ``check``
        raises Fenced when another attempt owns the run. Raises CheckpointError when the folder or
        a segment cannot be read, ConfigError when a segment after the state has an earlier format.
        Blocks.
        """
        make_folder(folder)
        segments, tail, header = read_tail(folder, base, step, settings, data)
        segment = SegmentWriter(folder, header, check=check)
        journal = cls(folder, segment)
        journal._committed = base
        journal._waiting.extend(record for record in tail.records if record.kind != EVALUATION)
        for record in tail.parts:
            journal._parts.add(record.part_key, Appended(record.meta, record))
        journal.changes = tail.changes
        if tail.is_trained_otherwise:
            journal.newest_usable = step
        evaluations = [record.meta for record in tail.records if record.kind == EVALUATION]
        journal._evaluations = {
            each["step"]: each["metrics"]
            for each in evaluations
            if each["step"] == step or (each["step"] > step and not tail.is_trained_otherwise)
        }
        segment.create(journal._first(), journal._copied())
        journal._waiting = deque(segment.copies or journal._waiting)
        if segment.copies is not None:
            delete_superseded(segments, tail.chain, check)
        return journal

    @classmethod
    def off(cls) -> Journal:
        """A journal that writes nothing and holds no records."""
        return cls(None, None)

    @property
    def num_batches(self) -> int:
        """Number of batches still to be replayed."""
        return sum(record.kind == BATCH for record in self._waiting)

    @property
    def is_written(self) -> bool:
        """False when storage failed, until the next ``begin``."""
        return self._segment is not None and self._segment.is_written

    @property
    def is_durable(self) -> bool:
        """Whether a resume finds all records appended so far, also after a crash of the machine.

        False as well while records before the newest state are lost and it is not committed yet.
        """
        segment = self._segment
        if segment is None or segment.first_state > self._committed:
            return False
        return segment.is_durable

    @property
    def lacks_space(self) -> bool:
        """Whether records wait for space on the disk, where checkpoints are saved too."""
        return self._segment is not None and self._segment.lacks_space

    @property
    def waiting(self) -> Sequence[Record]:
        """All records still to be replayed by ``again``."""
        return tuple(self._waiting)

    @property
    def waiting_parts(self) -> Sequence[Mapping[str, Any]]:
        """``Record.meta`` of all parts of groups that are not finished by the last record."""
        return tuple(part.meta for part in self._parts)

    def oldest_version(self, prompt_id: int) -> int | None:
        """Return the oldest policy version of a group's parts; None if they have no tokens."""
        metas = [part.meta for part in self._parts.of(prompt_id)]
        return min((meta["oldest_version"] for meta in metas if meta["num_tokens"]), default=None)

    def kept(self) -> Kept:
        """Count what the journal has of groups in generation."""
        metas = self.waiting_parts
        kinds = Counter(meta["part"] for meta in metas)
        tokens = sum(meta["num_tokens"] for meta in metas)
        return Kept(kinds[ANSWER], kinds[TURN], kinds[BEGUN], tokens)

    def end_at(
        self,
        position: int,
        *,
        step: int,
        why: str | None,
        invalid_parts: Mapping[tuple[int, int], str] | None = None,
    ) -> None:
        """Replay only the first ``position`` of the ``waiting`` records.

        They bring the run to ``step``; ``why`` is the problem of the next record. They are copied
        to a new segment, so that later events follow the last of them; nothing waits for the copy.
        ``invalid_parts``: prompt and index of parts that are not used, with the reason.
        """
        for (prompt_id, index), reason in (invalid_parts or {}).items():
            logger.warning("journal: answer %d: %s; it is generated again", index, reason)
            self._parts.drop(prompt_id, index)
        lost, later = self.waiting[position:], [at for at in self._evaluations if at > step]
        for at in later:
            logger.warning(
                "journal: the evaluation of step %d is repeated: batches before it are lost", at
            )
            del self._evaluations[at]
        if lost:
            logger.warning(
                "journal: %s, record at byte %d: %s; it and later records are ignored. To generate again: %s",
                *(lost[0].path, lost[0].offset, why, contents(lost)),
            )
        if lost or later:
            assert self._segment is not None, "what waits was read from a journal"
            self._waiting = deque(self.waiting[:position])
            self._segment = self._segment.next()
            self._segment.create_soon(self._first(), self._copied())
        elif invalid_parts:
            for prompt_id, index in invalid_parts:
                self._append(dropped_content(prompt_id, index))

    def again(self) -> Iterator[Record]:
        """Yield groups in order, up to and including the next batch, or all if no batch follows.

        Each record is yielded once.
        """
        while self._waiting:
            record = self._waiting.popleft()
            if record.kind == BATCH:
                meta = record.meta
                content = batch_content(
                    meta["step"],
                    meta["prompt_ids"],
                    meta["counts"],
                    meta.get("newest_id"),
                    drops_parts=meta.get("drops_parts", False),
                )
                self._newest_batch = meta["step"], content
            yield record
            if record.kind == BATCH:
                return

    async def groups(self, records: Iterable[Record]) -> Sequence[SampleGroup]:
        """Read, in a thread, those ``records`` that are groups. Raises CheckpointError."""
        wanted = [record for record in records if record.kind == GROUP]
        if not wanted:
            return []
        num_bytes = sum(record.size for record in wanted)
        what = f"{len(wanted)} groups of the journal in {self._folder} were not read"
        return await read_within(num_bytes, lambda: [record.group() for record in wanted], what)

    async def trained_since(
        self, base: int, step: int, *, backlog: Sequence[SampleGroup], until: int
    ) -> JournalBatches:
        """Read the batches of ``step`` to ``until`` - 1, which followed the state that names ``base``.

        Raises CheckpointError, see ``JournalBatches.read``.
        """
        if self._folder is None or self._segment is None:
            raise CheckpointError("this run has no journal")
        header = self._segment.header
        read = partial(
            JournalBatches.read,
            self._folder,
            base,
            step,
            settings=header.settings,
            data=header.data,
            backlog=backlog,
            until=until,
        )
        return await read_all(self._folder, read, f"the journal in {self._folder} was not read")

    def evaluation(self, step: int) -> Mapping[str, float] | None:
        """Return the metrics of the evaluation of ``step``; None if it is not in the journal."""
        return self._evaluations.get(step)

    def append_group(
        self, group: SampleGroup, *, wanted: bool, prompt: Prompt | None = None
    ) -> None:
        """Append a complete group, the answers to ``prompt``, and let go of its parts."""
        if self.is_written:
            with self._timed():
                answers = self._answers.get(group.prompt_id)
                self._append(group_content(group, is_kept=wanted, prompt=prompt, answers=answers))
        self._parts.drop(group.prompt_id)
        self._answers.pop(group.prompt_id, None)

    def add_part(self, part: Part, prompt: Prompt) -> None:
        """Append a part of a group in generation, which answers ``prompt``.

        While storage fails, finished answers are kept for the next segment.
        """
        is_finished = part.kind in (ANSWER, REWARD)
        if self._segment is None or not (self.is_written or is_finished):
            return
        with self._timed():
            appended = Appended(part_meta(part, prompt), part=part if is_finished else None)
            if self.is_written:
                self._append(part_content(part, appended.meta), appended)
        self._parts.add(part.key, appended)
        if part.kind == ANSWER:
            self._answers[part.prompt_id][part.index] = part.samples

    def add_reward(self, sample: Sample, prompt: Prompt, number: int, reward: float) -> None:
        """Append the reward of the ``number``-th sample of an answer, if the journal has the answer."""
        if sample.index in self._answers.get(prompt.prompt_id, ()):
            value = {"reward": reward}
            part = Part(prompt.prompt_id, sample.index, REWARD, number, value=value)
            self.add_part(part, prompt)

    def drop_parts(self, prompt_id: int | None = None, index: int | None = None) -> None:
        """Append that the parts of an answer, of a group, or of all groups are void.

        An answer or a group is then generated from scratch. Nothing is appended if there are none.
        """
        if prompt_id is None:
            self._answers.clear()
        elif index is None:
            self._answers.pop(prompt_id, None)
        else:
            self._answers[prompt_id].pop(index, None)
        if self._parts.drop(prompt_id, index):
            self._append(dropped_content(prompt_id, index))

    async def parts_of(self, prompt_id: int) -> Mapping[int, Sequence[Part]]:
        """Read, in a thread, the parts of a group's unfinished answers, in order, by index.

        Those that are not on disk, or are damaged, are left out. Raises CheckpointError when they
        cannot be read, or the storage hangs.
        """
        finished = (ANSWER, REWARD)
        appended = [part for part in self._parts.of(prompt_id) if part.meta["part"] not in finished]
        by_index: defaultdict[int, list[Part]] = defaultdict(list)
        for part in await self._read_parts(appended) if appended else ():
            by_index[part.index].append(part)
        return by_index

    async def kept_answers(self) -> Mapping[int, Sequence[Sample]]:
        """Read, in a thread, the samples of all finished answers by prompt, with their rewards.

        Groups refer to them from now on. Raises as ``parts_of`` does.
        """
        answers = {part.key: part for part in self._parts if part.meta["part"] in (ANSWER, REWARD)}
        read = await self._read_parts(tuple(answers.values())) if answers else ()
        for part in read:
            answers[part.key].part = part
        rewards = {part.key: part for part in read if part.kind == REWARD}
        samples: defaultdict[int, list[Sample]] = defaultdict(list)
        for part in read:
            if part.kind == ANSWER:
                self._answers[part.prompt_id][part.index] = part.samples
                samples[part.prompt_id] += with_rewards(part, rewards)
        return samples

    async def states(self) -> Sequence[bytes]:
        """Read, in a thread, the states of all environments. Raises as ``parts_of`` does."""
        states = [part for part in self._parts if part.meta["part"] == STATE]
        return [part.data for part in await self._read_parts(states)] if states else ()

    async def _read_parts(self, appended: Sequence[Appended]) -> Sequence[Part]:
        """Read parts; those that were written a moment ago are waited for."""
        await self.durable()
        records = [part.record for part in appended if part.record is not None]
        num_bytes = sum(record.size for record in records)
        what = f"{len(records)} answers and turns of the journal in {self._folder} were not read"
        return await read_within(num_bytes, lambda: valid_parts(records), what)

    def batch(
        self,
        step: int,
        groups: Sequence[SampleGroup],
        counts: Mapping[str, float],
        *,
        newest_id: int | None = None,
        drops_parts: bool = False,
    ) -> None:
        """Append the batch taken after ``step`` steps.

        ``newest_id`` is the newest prompt fetched by then. ``drops_parts``: groups that are not
        finished begin from scratch.
        """
        prompt_ids = [group.prompt_id for group in groups]
        content = batch_content(step, prompt_ids, counts, newest_id, drops_parts=drops_parts)
        self._newest_batch = step, content
        self._append(content)
        if drops_parts:
            self._parts.drop()
            self._answers.clear()

    def append_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluations[step] = metrics
        self._append(evaluation_content(step, metrics))

    async def begin(self, step: int) -> int:
        """Start a segment for a state of ``step`` steps that will be saved; return its number.

        The state must name that number. Later events go to the new segment, also while it is
        created. Raises Fenced when another attempt owns the run, CheckpointError when a waiting
        record cannot be read.
        """
        if self._segment is None:
            return 0
        self._segment = segment = self._segment.next(step)
        self._evaluations = {at: found for at, found in self._evaluations.items() if at >= step}
        await segment.start(self._first(), self._copied())
        self._waiting = deque(segment.copies or self._waiting)  # segments before it may be deleted
        return segment.header.number

    def compact(self, oldest_step: int) -> None:
        """Delete segments that only checkpoints before ``oldest_step`` need."""
        if self._folder is not None:
            delete_before(self._folder, oldest_step)

    async def durable(self) -> None:
        """Return when all records appended so far survive a crash of the machine.

        Returns as well if it cannot be written; see ``is_durable``. Raises Fenced when another attempt
        owns the run.
        """
        if self._segment is not None:
            with self._timed():
                await self._segment.durable()

    def note_committed(self, number: int) -> None:
        """Record that the state is committed that names segment ``number``."""
        self._committed = max(self._committed, number)

    def seconds(self) -> float:
        """Return the seconds spent since the last call, on the CPU and waiting for the disk."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._spent_s += time.monotonic() - started

    def close(self) -> None:
        """Write pending records and close the file; later records are not written.

        Blocks for a few seconds at most.
        """
        self._is_closed = True
        if self._segment is not None:
            self._segment.close()

    def _first(self) -> Sequence[bytes]:
        """Return the records that begin a segment, before those still to be replayed."""
        assert self._segment is not None
        of_step, batch = self._newest_batch
        taken = [batch] if of_step >= self._segment.header.step else []
        return [
            *taken,
            *(evaluation_content(at, metrics) for at, metrics in self._evaluations.items()),
        ]

    def _copied(self) -> Waiting:
        """Return what a new segment copies: records to replay, then parts."""
        return (*self._waiting, *self._parts)

    def _append(self, content: bytes, part: Appended | None = None) -> None:
        if self._segment is not None:
            self._segment.append(content, part)
            self._sync_later()

    def _sync_later(self) -> None:
        """Sync soon, whatever the loop awaits meanwhile; again until all records are on disk."""
        if self._timer is not None or self._is_closed:
            return
        try:
            self._timer = asyncio.get_running_loop().call_later(SYNC_AFTER_S, self._sync)
        except RuntimeError:  # no event loop runs yet
            assert self._segment is not None
            self._segment.sync_soon()

    def _sync(self) -> None:
        self._timer = None
        if self._segment is not None and self._segment.sync_soon():
            self._sync_later()
