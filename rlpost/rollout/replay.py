"""Checks which records of the journal a resume can replay.

Input: records in order, the rollout buffer and the prompt cursor of the checkpoint that they
follow. Output: how many of them the run can use. They are replayed on copies before anything is
trained. A record that does not match ends the replay, not the run, and is never trained at another
step than its own.

The chain of segments proves that no file is changed or missing. This second check compares the
records with the run's own state: it also covers segments without a chain, and prompt data that has
changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlpost.columns import FloatColumn, IntColumn
from rlpost.durable.journal_format import BATCH, GROUP, Record, prompt_digest
from rlpost.rollout.buffer import RolloutBuffer
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample


class Cursor(Protocol):
    """The source of prompts."""

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts; their ids rise."""

    def state(self) -> Mapping[str, int]:
        """Return its position."""

    def copy(self) -> Cursor:
        """Return an independent cursor at the same position."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The result: the first ``position`` records match the run and bring it to ``step``.

    ``why`` the next record does not match; None if all match. ``invalid_parts``: prompt and index
    of answers in generation that do not match, with the reason.
    """

    position: int
    step: int
    why: str | None = None
    invalid_parts: Mapping[tuple[int, int], str] = field(default_factory=dict)


def newest_fetched(record: Record) -> int:
    """Return the newest id that a GROUP or BATCH record proves to have been fetched.

    A batch without ``newest_id`` (older journals) proves only the ids of its groups.
    """
    if record.kind == GROUP:
        return int(record.meta["prompt_id"])
    return max([*record.meta["prompt_ids"], record.meta.get("newest_id", -1)])


def fit(
    records: Sequence[Record],
    buffer: RolloutBuffer,
    prompts: Cursor,
    *,
    parts: Sequence[Mapping[str, Any]] = (),
    newest_usable: int | None = None,
) -> Fit:
    """Find how many of ``records`` follow the state of ``buffer``; takes prompts as needed.

    ``parts``: those of groups in generation, as ``Record.meta``. ``newest_usable``: the newest
    policy version whose tokens can be used; later ones were trained with other settings. The buffer
    is not changed. Raises DataError for an invalid row.
    """
    trial = _Trial(buffer, prompts, newest_usable)
    position, why = 0, None
    for record in records:
        why = trial.batch(record) if record.kind == BATCH else trial.group(record)
        if why is not None:
            break
        position += 1
    invalid = {}
    for meta in parts:
        problem = trial.part(meta)
        if problem is not None:
            invalid[meta["prompt_id"], meta["index"]] = problem
    return Fit(position, trial.step, why, invalid)


class _Trial:
    """The bookkeeping of a resume, on a copy of the buffer and with groups without answers."""

    def __init__(
        self, buffer: RolloutBuffer, prompts: Cursor, newest_usable: int | None = None
    ) -> None:
        self._newest_usable = newest_usable
        backlog = buffer.backlog()
        self._buffer = RolloutBuffer(buffer.rules, backlog, step=buffer.step)
        self._cursor = prompts
        self._waiting = {entry.prompt.prompt_id: entry.prompt for entry in backlog.unfinished}

    @property
    def step(self) -> int:
        """The step that the records bring the run to."""
        return self._buffer.step

    def group(self, record: Record) -> str | None:
        """Replay a group; return why it does not match, or None."""
        why = self.part(record.meta)
        if why is None:
            del self._waiting[record.meta["prompt_id"]]
            self._buffer.replay(_without_answers(record), wanted=record.meta["wanted"])
        return why

    def part(self, meta: Mapping[str, Any]) -> str | None:
        """Return why answers with this ``Record.meta`` are not those of a waiting prompt, or None."""
        prompt_id, step = meta["prompt_id"], self._buffer.step
        self._fetch(prompt_id)
        prompt = self._waiting.get(prompt_id)
        if prompt is None:
            return f"a group of prompt {prompt_id}, for which the run does not wait at step {step}"
        if meta.get("prompt") not in (None, prompt_digest(prompt)):
            changed = "--prompt-data or the tokenizer has changed"
            if prompt.images:
                changed = "--prompt-data, the file of an image or the tokenizer has changed"
            return f"answers to prompt {prompt_id}, which reads differently now: {changed}"
        newest = self._newest_usable
        if newest is not None and meta["newest_version"] > newest:
            return f"answers to prompt {prompt_id}, written by weights that other settings trained"
        if meta["newest_version"] > step:
            return f"a group written by the weights of step {meta['newest_version']}, while the run is at step {step}"
        return None

    def batch(self, record: Record) -> str | None:
        """Replay a batch; return why it does not match, or None."""
        step = self._buffer.step
        if record.meta["step"] != step:
            return f"the batch of step {record.meta['step']}, while the run is at step {step}"
        self._fetch(newest_fetched(record))
        try:
            self._buffer.take_again(record.meta["prompt_ids"], record.meta["counts"])
        except KeyError as prompt_id:
            return f"the batch of step {step} has a group of prompt {prompt_id}, which is not there"
        self._buffer.mark_trained()
        self._buffer.version = self._buffer.rules.versions.engines(self._buffer.step)
        return None

    def _fetch(self, newest_id: int) -> None:
        while self._buffer.newest_id < newest_id:
            fetched = self._cursor.take(1)
            self._buffer.add_prompts(fetched)
            self._waiting |= {prompt.prompt_id: prompt for prompt in fetched}


def _without_answers(record: Record) -> SampleGroup:
    """Return the group of a record with prompt id and versions only."""
    prompt_id, version = record.meta["prompt_id"], record.meta["oldest_version"]
    sample = Sample(prompt_id, 0, IntColumn(), IntColumn(), FloatColumn(), "", "stop", version)
    return SampleGroup(prompt_id, (ScoredSample(sample, 0.0),))
