"""The batches of steps that were trained since a checkpoint, read again while the run continues.

Input: the state of a checkpoint, and the records of later steps on disk: the journal's segments, or
the recording of --load-debug-rollout-data. Output: the groups of each later step, as they were
trained.
A group of a batch was in the checkpoint's backlog, or was finished after it. Steps that were
themselves replayed are there too: a resume copies their records into its own segment.

The journal is read beside its writer: a batch is on disk before it is trained, and reading ends
before the first incomplete record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from rlpost.durable.daemon_threads import in_daemon
from rlpost.durable.journal_chain import follow, read_folder
from rlpost.durable.journal_format import BATCH, GROUP, Record, unreadable_words
from rlpost.durable.recorded import read_groups
from rlpost.errors import CheckpointError
from rlpost.types import SampleGroup


class TrainedBatches(Protocol):
    """The batches after one checkpoint."""

    async def groups(self, step: int) -> list[SampleGroup]:
        """Return the groups trained after ``step`` steps. Raises CheckpointError, DataError."""


class JournalBatches:
    """Batches from the journal."""

    def __init__(
        self, batches: Mapping[int, Record], groups: Mapping[int, Record | SampleGroup]
    ) -> None:
        """``batches`` by step, ``groups`` by prompt id; a group in the journal is its record."""
        self._batches, self._groups = batches, groups

    @classmethod
    def read(
        cls,
        folder: Path,
        base: int,
        step: int,
        *,
        settings: str,
        data: str | None,
        backlog: Sequence[SampleGroup],
        until: int,
    ) -> JournalBatches:
        """Find the batches of ``step`` to ``until`` - 1. Blocks.

        Args:
            base: the segment that the checkpoint's state names.
            step: trained steps of that state.
            settings: as ``data``, identifies the records of the run: see ``journal_format.Header``.
            backlog: finished groups of that state.

        Raises CheckpointError when a batch or one of its groups is missing, or the journal cannot
        be read.
        """
        try:
            segments, unreadable = read_folder(folder)
        except OSError as error:
            raise CheckpointError(unreadable_words(folder, error)) from error
        tail = follow(segments, base, step, settings, data=data, unreadable=unreadable)
        batches = {record.meta["step"]: record for record in tail.records if record.kind == BATCH}
        groups: dict[int, Record | SampleGroup] = {group.prompt_id: group for group in backlog}
        groups |= {
            record.meta["prompt_id"]: record for record in tail.records if record.kind == GROUP
        }
        for batch_step in range(step, until):
            batch = batches.get(batch_step)
            ids = [] if batch is None else batch.meta["prompt_ids"]
            if batch is None or any(prompt_id not in groups for prompt_id in ids):
                problems = "; ".join(tail.problems) or "it was not written completely"
                raise CheckpointError(
                    f"the journal in {folder} does not hold the batch of step {batch_step}, which "
                    f"follows the checkpoint of step {step}: {problems}"
                )
        return cls(batches, groups)

    async def groups(self, step: int) -> list[SampleGroup]:
        """See ``TrainedBatches``: in the order of ``RolloutBuffer.take``."""
        ids = sorted(self._batches[step].meta["prompt_ids"])

        def read() -> list[SampleGroup]:
            held = [self._groups[prompt_id] for prompt_id in ids]
            return [each.group() if isinstance(each, Record) else each for each in held]

        return await in_daemon(read)


class RecordedBatches:
    """Batches from the recording that the run trains on (--load-debug-rollout-data)."""

    def __init__(self, template: str) -> None:
        self._template = template

    async def groups(self, step: int) -> list[SampleGroup]:
        found = await in_daemon(partial(read_groups, self._template, step))
        return sorted(found, key=lambda group: group.prompt_id)
