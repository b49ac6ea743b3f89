"""The collector: turns prompts into batches of groups, according to --rollout-mode.

Input: a prompt cursor, a writer of groups, filters, a rollout buffer. Output: one batch per step,
the pending prompts at any moment, and counts. This module does the waiting; the ``RolloutBuffer``
makes every decision.

    sync            batch | train | sync | batch | train | sync
    one_step_off    batch | train           | sync | train         | sync      generation of the next batch begins when
                          | batch of step 2 |      | batch of 3    |           training begins and ends before sync
    fully_async     batches all the time; an engine with new weights resumes the answers that it was writing

The journal records finished groups and taken batches; after a crash they are replayed from there
first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from rlpost.durable.daemon_threads import in_daemon
from rlpost.durable.journal import Journal
from rlpost.durable.journal_format import GROUP
from rlpost.durable.recorded import read_groups
from rlpost.engines.connection import Connection
from rlpost.errors import ConfigError, DataError, Preempted
from rlpost.rollout.buffer import RolloutBuffer
from rlpost.rollout.filters import BufferFilter, GroupFilter, keeps_when_insufficient, pop_first
from rlpost.rollout.replay import Cursor, Fit, fit, newest_fetched
from rlpost.rollout.response_builder import without_older
from rlpost.types import Backlog, Prompt, SampleGroup, Unfinished

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2
MANY_BATCHES = 8
"""Warn when this many batches of groups were dropped for one; again at each doubling."""


class Writer(Protocol):
    """Generates groups; see ``rlpost.rollout.generate.GroupWriter``."""

    connection: Connection

    async def write(self, entry: Unfinished) -> SampleGroup | Unfinished:
        """Return the group, or its partial answers when generation was aborted."""

    async def keep_states(self, states: Sequence[bytes]) -> None:
        """Delete what environments of earlier attempts have left, except these states."""


Watched = Callable[[Awaitable[None]], Awaitable[None]]
"""Awaits its argument, and health-checks the engines until it is done."""


async def unwatched(generating: Awaitable[None]) -> None:
    """Await without health checks: a ``Watched``."""
    await generating


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of a collector.

    Attributes:
        wanted: which scored groups are trained.
        first: which waiting groups start first.
        mask_older: mask tokens of versions older than an answer's last one out of the loss.
        ahead: generate the next batch during training.
        record: called with the step and the groups of each batch.
        counters: further counts, by metric name.
        watched: health-checks the engines while a batch is awaited.
        read_ahead: stores the images of the next prompts; blocks. None for text alone.
    """

    wanted: GroupFilter = lambda group: True
    first: BufferFilter = pop_first
    mask_older: bool = False
    ahead: bool = False
    record: Callable[[int, Sequence[SampleGroup]], object] | None = None
    counters: Callable[[], Mapping[str, float]] = dict
    watched: Watched = unwatched
    read_ahead: Callable[[], None] | None = None


class Collector:
    """Generates batches of groups; see the module."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        cursor: Cursor,
        writer: Writer,
        *,
        choices: Choices,
        stop_requested: Callable[[], bool],
        journal: Journal | None = None,
    ) -> None:
        self._buffer, self._cursor, self._writer = buffer, cursor, writer
        self._choices, self._stop_requested = choices, stop_requested
        self._journal = journal or Journal.off()
        self._begins_early = choices.ahead or buffer.rules.max_staleness is not None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._num_dropped = 0  # since the last batch
        self._drops_surplus = buffer.rules.max_staleness is None and not buffer.rules.keep_partial
        self._has_parts = False  # whether the buffer has the answers of the journal
        self._check_journal()

    async def batch(self) -> list[SampleGroup]:
        """Return the groups to train next.

        Raises:
            Preempted: a stop was requested; running groups are aborted and in the backlog.
            RolloutError: a request failed permanently; the other groups are aborted.
            CheckpointError: the journal became unreadable.
        """
        if self._stop_requested():
            await self._stop()
        groups = await self._replayed_batch()
        if groups is None:
            await self._read_ahead()
            self._open()
            await self._until_batch()
            self._buffer.add_counts(self._choices.counters())
            groups = self._buffer.take()
            assert groups is not None, "there was a batch"
            self._num_dropped = 0
            if self._choices.record is not None:
                self._choices.record(self._buffer.step, groups)
            self._journal.batch(
                self._buffer.step,
                groups,
                self._buffer.counts(),
                newest_id=self._buffer.newest_id,
                drops_parts=self._drops_surplus,
            )
        await self._journal.durable()
        if (
            self._begins_early
            and not self._journal.num_batches
            and self._buffer.step + 1 < self._buffer.rules.num_steps
        ):
            await self._replayed_batch()
            await self._read_ahead()
            self._open()
        return groups

    def mark_trained(self) -> None:
        """Record that the last batch is trained."""
        self._buffer.mark_trained()

    async def prepare_update(self) -> None:
        """Bring generation to a point where the weights may change. Raises as ``batch`` does."""
        if self._choices.ahead and self._buffer.is_open:
            await self._until_batch()

    def mark_synced(self, version: int) -> None:
        """Record that the engines have the weights of ``version``."""
        self._buffer.version = version
        if self._buffer.is_open:
            self._fill()

    def pending(self) -> tuple[Mapping[str, int], Backlog]:
        """Return the state of the cursor, and all fetched prompts that are not trained."""
        self._buffer.add_counts(self._choices.counters())
        return self._cursor.state(), self._buffer.backlog()

    def wants_weights(self) -> bool:
        """Whether anything may be generated before the next batch is trained.

        False while batches are replayed.
        """
        return self._journal.num_batches <= self._begins_early

    def counts(self) -> Mapping[str, float]:
        """Return counts between the last two batches, by metric name."""
        return self._buffer.counts()

    def _check_journal(self) -> None:
        """Use only those journal records that match this run and its prompts."""
        records, usable = self._journal.waiting, Fit(0, self._buffer.step)
        parts = self._journal.waiting_parts
        if records or parts:
            usable = fit(
                records,
                self._buffer,
                self._cursor.copy(),
                parts=parts,
                newest_usable=self._journal.newest_usable,
            )
            self._choices.counters()  # discard counts of rows that the copy skipped
        self._journal.end_at(
            usable.position, step=usable.step, why=usable.why, invalid_parts=usable.invalid_parts
        )

    async def _replayed_batch(self) -> list[SampleGroup] | None:
        """Replay finished groups; return the batch that was taken here before a crash, or None."""
        taken, records = None, list(self._journal.again())
        groups = iter(await self._journal.groups(records))
        for record in records:
            while self._buffer.newest_id < newest_fetched(record):
                self._buffer.add_prompts(self._cursor.take(1))
            if record.kind == GROUP:
                self._buffer.replay(next(groups), wanted=record.meta["wanted"])
            else:
                self._choices.counters()  # discard: the record has them
                taken = self._buffer.take_again(record.meta["prompt_ids"], record.meta["counts"])
        if taken is None and not self._has_parts:
            self._has_parts = True
            await self._resume_parts()
        return taken

    async def _resume_parts(self) -> None:
        """Return the answers that an earlier attempt finished to their groups."""
        await self._writer.keep_states(await self._journal.states())
        answers = await self._journal.kept_answers()
        newest_id = max((meta["prompt_id"] for meta in self._journal.waiting_parts), default=-1)
        while self._buffer.newest_id < newest_id:
            self._buffer.add_prompts(self._cursor.take(1))
        for prompt_id, samples in answers.items():
            self._buffer.add_answers(prompt_id, samples)

    async def stop(self) -> None:
        """Abort running groups.

        After a stop request, do not wait for a hung engine or a slow tool.
        """
        self._buffer.is_open = False
        await self._writer.connection.halt(list(self._tasks), must_leave=self._stop_requested)

    async def _read_ahead(self) -> None:
        """Wait until the images of the next prompts are stored, so that taking them is quick.

        Raises Preempted on a stop request, also while storage hangs.
        """
        if self._choices.read_ahead is None:
            return
        reading = asyncio.ensure_future(in_daemon(self._choices.read_ahead))
        while not reading.done():
            if self._stop_requested():
                await self._stop()
            await asyncio.wait([reading], timeout=STOP_POLL_S)
        reading.result()

    def _open(self) -> None:
        self._buffer.is_open = True
        self._writer.connection.resume()
        self._fill()

    async def _until_batch(self) -> None:
        """Wait for a batch; where batches are generated one at a time, abort the surplus groups."""

        async def generate() -> None:
            await self._wait()
            if self._buffer.rules.max_staleness is None:
                await self.stop()
                if self._drops_surplus:
                    self._journal.drop_parts()

        await self._choices.watched(generate())  # the abort too: a hung engine would block it

    async def _wait(self) -> None:
        while True:
            if self._failure is not None:
                await self.stop()
                raise self._failure
            if self._stop_requested():
                await self._stop()
            if self._buffer.has_batch():
                return
            assert self._tasks, "no batch, and no group in flight"
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_POLL_S):
                    await self._changed.wait()

    async def _stop(self) -> NoReturn:
        await self.stop()
        raise Preempted(
            f"a stop was requested while generating; {self._buffer.num_finished} groups are kept"
        )

    def _fill(self) -> None:
        """Start groups up to the buffer's capacity: waiting ones first, then new prompts."""
        while (capacity := self._buffer.capacity()) > 0:
            for entry in self._chosen(capacity) or self._buffer.add_prompts(
                self._cursor.take(capacity)
            ):
                task = asyncio.create_task(self._run(self._start(entry.prompt.prompt_id)))
                self._tasks.add(task)
                task.add_done_callback(self._done)

    def _start(self, prompt_id: int) -> Unfinished:
        """Start a group; forget what the journal has of it if that is too old."""
        recorded_since = self._journal.oldest_version(prompt_id)
        entry = self._buffer.start(prompt_id, recorded_since=recorded_since)
        if recorded_since is not None and self._buffer.since(prompt_id) > recorded_since:
            self._journal.drop_parts(prompt_id)
        return entry

    def _chosen(self, capacity: int) -> Sequence[Unfinished]:
        """Return the waiting groups to start.

        Raises ConfigError when --buffer-filter-path returns others.
        """
        takes_first = self._choices.first is pop_first  # then the backlog need not be copied
        waiting = self._buffer.longest_waiting(capacity) if takes_first else self._buffer.waiting
        chosen = list(self._choices.first(waiting, capacity))[:capacity] if waiting else []
        left = {entry.prompt.prompt_id for entry in waiting}
        for entry in chosen:
            if isinstance(entry, Unfinished) and entry.prompt.prompt_id in left:
                left.remove(entry.prompt.prompt_id)
            else:
                raise ConfigError(
                    "--buffer-filter-path: the function returned a group that is not waiting, or one twice: "
                    f"{repr(entry)[:200]}; it has to return groups that it was given, each once"
                )
        return chosen

    async def _run(self, entry: Unfinished) -> None:
        try:
            written = await self._writer.write(entry)
        except asyncio.CancelledError:
            self._buffer.abort(entry)
            raise
        if isinstance(written, Unfinished):
            self._buffer.abort(written)
            return
        if self._choices.mask_older:
            scored = (replace(each, sample=without_older(each.sample)) for each in written.samples)
            written = replace(written, samples=tuple(scored))
        # A group without samples stands for a prompt that was given up.
        is_kept = bool(written.samples) and self._is_wanted(written)
        self._journal.append_group(written, wanted=is_kept, prompt=entry.prompt)
        self._buffer.finish(written, wanted=is_kept)
        if not is_kept:
            self._warn_if_many_dropped()
        if self._buffer.is_open and self._failure is None:
            self._fill()

    def _is_wanted(self, group: SampleGroup) -> bool:
        """Whether to train a group, by the filter and by the number of other groups."""
        wanted = self._choices.wanted
        return wanted(group) or (keeps_when_insufficient(wanted) and not self._buffer.has_spare())

    def _warn_if_many_dropped(self) -> None:
        """Warn about a filter that drops nearly all groups: the run would appear to hang."""
        self._num_dropped += 1
        batches, rest = divmod(self._num_dropped, self._buffer.rules.batch_size)
        if rest == 0 and batches >= MANY_BATCHES and batches & (batches - 1) == 0:
            logger.warning(
                "step %d: %d groups were dropped by --dynamic-sampling-filter-path and %d kept; are the prompts too "
                "easy or too hard?",
                self._buffer.step,
                self._num_dropped,
                self._buffer.num_finished,
            )

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled():
            self._failure = self._failure or task.exception()


class Replay:
    """Recorded batches (--load-debug-rollout-data), with the interface of ``Collector``."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        cursor: Cursor,
        template: str,
        *,
        counters: Callable[[], Mapping[str, float]] = dict,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._buffer, self._cursor, self._template = buffer, cursor, template
        self._counters, self._stop_requested = counters, stop_requested

    async def batch(self) -> list[SampleGroup]:
        """Return the recorded groups of the step, after fetching their prompts.

        Raises:
            Preempted: a stop was requested.
            DataError: the recording is missing, or its prompts are not the next ones of this run.
        """
        if self._stop_requested():
            raise Preempted("a stop was requested before the next recorded batch")
        if not self._buffer.has_batch():
            for group in self._recorded():
                self._buffer.replay(group)
        self._buffer.add_counts(self._counters())
        groups = self._buffer.take()
        assert groups is not None, "a recording is a batch"
        return groups

    def _recorded(self) -> Sequence[SampleGroup]:
        step = self._buffer.step
        groups = read_groups(self._template, step)
        newest = max(group.prompt_id for group in groups)
        while self._buffer.newest_id < newest:
            self._buffer.add_prompts(self._cursor.take(1))
        waiting = {entry.prompt.prompt_id for entry in self._buffer.waiting}
        found = sorted(group.prompt_id for group in groups)
        if len(groups) != self._buffer.rules.batch_size or not waiting.issuperset(found):
            raise DataError(
                f"{self._template}: the recording of step {step} has {len(groups)} groups, of prompts "
                f"{found[0]}..{found[-1]}; this run needs {self._buffer.rules.batch_size}, "
                f"starting at {sorted(waiting)[:1]}"
            )
        return groups

    def mark_trained(self) -> None:
        self._buffer.mark_trained()

    async def prepare_update(self) -> None:
        """Do nothing: no group is running."""

    def mark_synced(self, version: int) -> None:
        self._buffer.version = version

    def pending(self) -> tuple[Mapping[str, int], Backlog]:
        return self._cursor.state(), self._buffer.backlog()

    def wants_weights(self) -> bool:
        """True: engines are updated as if they had generated the batches."""
        return True

    def counts(self) -> Mapping[str, float]:
        """See ``Collector``: the same names."""
        return self._buffer.counts()

    async def stop(self) -> None:
        """Do nothing: no group is running."""


class Supervised(Replay):
    """Batches of supervised examples: groups of one sample, made from the prompts themselves."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        cursor: Cursor,
        make: Callable[[Prompt], SampleGroup],
        *,
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(buffer, cursor, "", stop_requested=stop_requested)
        self._make = make

    def _recorded(self) -> Sequence[SampleGroup]:
        prompts = self._cursor.take(self._buffer.rules.batch_size)
        self._buffer.add_prompts(prompts)
        return [self._make(prompt) for prompt in prompts]
