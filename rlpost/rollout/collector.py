"""From the prompt cursor to batches of groups, in the way of --rollout-mode.

Input: a cursor, a writer of groups, filters, a rollout buffer. Output: one batch a step, what is pending at any moment,
and counts of what happened on the way. This module only waits: every decision is made by the ``RolloutBuffer``.

    sync            batch | train | sync | batch | train | sync
    one_step_off    batch | train           | sync | train         | sync      generation of the next batch begins when
                          | batch of step 2 |      | batch of 3    |           training begins and ends before sync
    fully_async     batches all the time; an engine that gets new weights goes on with what it was writing

What finished and which batches were taken goes to the journal; after a crash they come from there first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from rlpost.errors import ConfigError, DataError, Preempted
from rlpost.rollout.buffer import RolloutBuffer
from rlpost.rollout.filters import BufferFilter, GroupFilter, keeps_when_insufficient, pop_first
from rlpost.rollout.journal import Journal
from rlpost.rollout.journal_format import GROUP
from rlpost.rollout.recorded import read_groups
from rlpost.rollout.replay import Fit, fit, newest_fetched
from rlpost.rollout.response_builder import without_older
from rlpost.types import Backlog, Prompt, SampleGroup, Unfinished

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2
MANY_BATCHES = 8  # so many times a batch dropped for one batch, and again at twice as many


class Cursor(Protocol):
    """Where prompts come from."""

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; their ids rise."""

    def state(self) -> Mapping[str, int]:
        """Where it stands."""

    def copy(self) -> Cursor:
        """Another one that stands there."""


class Writer(Protocol):
    """Who makes groups; see ``rlpost.rollout.generate.GroupWriter``."""

    connection: Any

    async def write(self, entry: Unfinished) -> SampleGroup | Unfinished:
        """The group, or how far it got."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user may decide: which scored groups are wanted, which waiting ones start first, whether tokens of older
    weights than the last count, whether the next batch is made while training, and who writes batches down.
    ``counters`` are more things that are counted, by metric name; ``watch`` looks after the engines while entered.
    """

    wanted: GroupFilter = lambda group: True
    first: BufferFilter = pop_first
    mask_older: bool = False
    ahead: bool = False
    record: Callable[[int, Sequence[SampleGroup]], object] | None = None
    counters: Callable[[], Mapping[str, float]] = dict
    watch: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


class Collector:
    """Batches of groups that are generated; see the module."""

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
        self._check_journal()

    async def batch(self) -> list[SampleGroup]:
        """The groups to train next.

        Raises:
            Preempted: a stop was requested; everything is cut off and in the backlog.
            RolloutError: a request failed for good; everything else is cut off.
            CheckpointError: the journal cannot be read any more.
        """
        if self._stop_requested():
            await self._stopped()
        groups = self._again()
        if groups is None:
            self._open()
            await self._until_batch()
            self._buffer.counted(self._choices.counters())
            groups = self._buffer.take()
            assert groups is not None, "there was a batch"
            self._num_dropped = 0
            if self._choices.record is not None:
                self._choices.record(self._buffer.step, groups)
            self._journal.batch(self._buffer.step, groups, self._buffer.counts(), newest_id=self._buffer.newest_id)
        await self._journal.durable()
        if (
            self._begins_early
            and not self._journal.num_batches
            and self._buffer.step + 1 < self._buffer.rules.num_steps
        ):
            self._again()
            self._open()
        return groups

    def trained(self) -> None:
        """The last batch is trained."""
        self._buffer.trained()

    async def settle(self) -> None:
        """Bring generation to where the weights may change. Raises what ``batch`` raises."""
        if self._choices.ahead and self._buffer.is_open:
            await self._until_batch()

    def synced(self, version: int) -> None:
        """The engines have the weights of ``version``."""
        self._buffer.version = version
        if self._buffer.is_open:
            self._fill()

    def in_hand(self) -> tuple[Mapping[str, int], Backlog]:
        """State of the cursor, and all that was fetched before it and is not trained."""
        self._buffer.counted(self._choices.counters())
        return self._cursor.state(), self._buffer.backlog()

    def wants_weights(self) -> bool:
        """Whether something may be written before the next batch is trained: not while the journal has batches."""
        return self._journal.num_batches <= self._begins_early

    def counts(self) -> Mapping[str, float]:
        """What happened before the last batch and since the one before it, by metric name."""
        return self._buffer.counts()

    def _check_journal(self) -> None:
        """Before anything is trained: what of the journal belongs to this run and these prompts."""
        records, found = self._journal.waiting, Fit(0, self._buffer.step)
        if records:
            found = fit(records, self._buffer, self._cursor.copy())
            self._choices.counters()  # rows that the copy skipped
        self._journal.end_at(found.position, step=found.step, why=found.why)

    def _again(self) -> list[SampleGroup] | None:
        """The batch that was taken here before a crash; all groups that had finished are in the buffer once more."""
        taken = None
        for record in self._journal.again():
            while self._buffer.newest_id < newest_fetched(record):
                self._buffer.fetched(self._cursor.take(1))
            if record.kind == GROUP:
                self._buffer.replayed(record.group(), wanted=record.meta["wanted"])
            else:
                self._choices.counters()  # they are in the record
                taken = self._buffer.take_again(record.meta["prompt_ids"], record.meta["counts"])
        return taken

    async def stop(self) -> None:
        """Cut off what runs. A run that has to leave waits neither for an engine that hangs nor for a slow tool."""
        self._buffer.is_open = False
        await self._writer.connection.halt(list(self._tasks), must_leave=self._stop_requested)

    def _open(self) -> None:
        self._buffer.is_open = True
        self._writer.connection.go_on()
        self._fill()

    async def _until_batch(self) -> None:
        """Wait until there is a batch; where generation works for one at a time, cut off the rest."""
        async with self._choices.watch():  # also while the rest is cut off: an engine that hangs would never let go
            await self._wait()
            if self._buffer.rules.max_staleness is None:
                await self.stop()

    async def _wait(self) -> None:
        while True:
            if self._failure is not None:
                await self.stop()
                raise self._failure
            if self._stop_requested():
                await self._stopped()
            if self._buffer.has_batch():
                return
            assert self._tasks, "no batch, and nothing that could become one"
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_POLL_S):
                    await self._changed.wait()

    async def _stopped(self) -> NoReturn:
        await self.stop()
        raise Preempted(f"a stop was requested while generating; {self._buffer.num_finished} groups are kept")

    def _fill(self) -> None:
        """Start as many groups as the buffer has capacity for: first those that wait, then new prompts."""
        while (capacity := self._buffer.capacity()) > 0:
            for entry in self._chosen(capacity) or self._buffer.fetched(self._cursor.take(capacity)):
                task = asyncio.create_task(self._run(self._buffer.started(entry.prompt.prompt_id)))
                self._tasks.add(task)
                task.add_done_callback(self._done)

    def _chosen(self, capacity: int) -> Sequence[Unfinished]:
        """Which of the groups that wait start now. Raises ConfigError when --buffer-filter-path names others."""
        waiting = self._buffer.waiting
        chosen = list(self._choices.first(waiting, capacity))[:capacity] if waiting else []
        left = {entry.prompt.prompt_id for entry in waiting}
        for entry in chosen:
            if isinstance(entry, Unfinished) and entry.prompt.prompt_id in left:
                left.remove(entry.prompt.prompt_id)
            else:
                raise ConfigError(
                    "rollout.buffer_filter_path: the function returned what does not wait, or the same twice: "
                    f"{repr(entry)[:200]}; it has to return groups that it was given, each once"
                )
        return chosen

    async def _run(self, entry: Unfinished) -> None:
        try:
            written = await self._writer.write(entry)
        except asyncio.CancelledError:
            self._buffer.cut_off(entry)
            raise
        if isinstance(written, Unfinished):
            self._buffer.cut_off(written)
            return
        if self._choices.mask_older:
            scored = (replace(each, sample=without_older(each.sample)) for each in written.samples)
            written = replace(written, samples=tuple(scored))
        wanted = bool(written.samples) and self._is_wanted(written)  # without samples it was given up
        self._journal.finished(written, wanted=wanted, prompt=entry.prompt)
        self._buffer.finished(written, wanted=wanted)
        if not wanted:
            self._say_dropped()
        if self._buffer.is_open and self._failure is None:
            self._fill()

    def _is_wanted(self, group: SampleGroup) -> bool:
        """Whether to train a group, by the filter, and by what there would be without it."""
        wanted = self._choices.wanted
        return wanted(group) or (keeps_when_insufficient(wanted) and not self._buffer.has_spare())

    def _say_dropped(self) -> None:
        """A filter that drops nearly everything looks like a run that hangs."""
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
    """Batches that were recorded (--load-debug-rollout-data): the same face as ``Collector``, and no engine."""

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
        """The recorded groups of the step, whose prompts are fetched.

        Raises:
            Preempted: a stop was requested.
            DataError: there is no recording, or it answers prompts that are not this run's next ones.
        """
        if self._stop_requested():
            raise Preempted("a stop was requested before the next recorded batch")
        if not self._buffer.has_batch():
            for group in self._recorded():
                self._buffer.replayed(group)
        self._buffer.counted(self._counters())
        groups = self._buffer.take()
        assert groups is not None, "a recording is a batch"
        return groups

    def _recorded(self) -> Sequence[SampleGroup]:
        step = self._buffer.step
        groups = read_groups(self._template, step)
        newest = max(group.prompt_id for group in groups)
        while self._buffer.newest_id < newest:
            self._buffer.fetched(self._cursor.take(1))
        waiting = {entry.prompt.prompt_id for entry in self._buffer.waiting}
        found = sorted(group.prompt_id for group in groups)
        if len(groups) != self._buffer.rules.batch_size or not waiting.issuperset(found):
            raise DataError(
                f"{self._template}: the recording of step {step} has {len(groups)} groups, of prompts "
                f"{found[0]}..{found[-1]}; this run needs {self._buffer.rules.batch_size}, from "
                f"{sorted(waiting)[:1]} on"
            )
        return groups

    def trained(self) -> None:
        """See ``Collector``."""
        self._buffer.trained()

    async def settle(self) -> None:
        """Nothing runs."""

    def synced(self, version: int) -> None:
        """See ``Collector``."""
        self._buffer.version = version

    def in_hand(self) -> tuple[Mapping[str, int], Backlog]:
        """See ``Collector``."""
        return self._cursor.state(), self._buffer.backlog()

    def wants_weights(self) -> bool:
        """Engines follow the training as if they had written the batches."""
        return True

    def counts(self) -> Mapping[str, float]:
        """See ``Collector``: the same names."""
        return self._buffer.counts()

    async def stop(self) -> None:
        """Nothing runs."""
