"""The parts of groups in generation: which of them count, at any moment.

Input: events in order: a part was recorded, parts became void, a group was finished. Output: the
parts of each group that is not finished, each once. The journal keeps them of a running attempt,
``journal_chain`` folds the records of an earlier one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlpost.durable.journal_format import (
    ANSWER,
    TOKENS,
    TURN,
    DamagedRecord,
    Part,
    PartKey,
    Record,
    part_content,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of groups in generation.

    Finished ``answers``, ``turns`` of others, answers that are ``begun_again``, and the tokens of
    answers and turns.
    """

    answers: int
    turns: int
    begun_again: int
    tokens: int


class OpenParts(Generic[T]):
    """Parts by key; ``T`` is where a part is."""

    def __init__(self) -> None:
        self._by_prompt: dict[int, dict[PartKey, T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_prompt.values()))

    def __iter__(self) -> Iterator[T]:
        for parts in self._by_prompt.values():
            yield from parts.values()

    def add(self, key: PartKey, where: T) -> None:
        """Add a part. It replaces an earlier one with its key, and the parts that it completes.

        An answer completes all parts of its index, a turn the tokens in progress.
        """
        parts = self._by_prompt.setdefault(key.prompt_id, {})
        if key.kind in (ANSWER, TURN):
            for other in [each for each in parts if each.index == key.index]:
                if key.kind == ANSWER or other.kind == TOKENS:
                    del parts[other]
        parts.pop(key, None)  # so that it comes last
        parts[key] = where

    def drop(self, prompt_id: int | None = None, index: int | None = None) -> bool:
        """Forget the parts of an answer, of a group, or all; return whether there were any."""
        if prompt_id is None:
            had_any = bool(self._by_prompt)
            self._by_prompt.clear()
            return had_any
        if index is None:
            return self._by_prompt.pop(prompt_id, None) is not None
        parts = self._by_prompt.get(prompt_id, {})
        of_answer = [key for key in parts if key.index == index]
        for key in of_answer:
            del parts[key]
        return bool(of_answer)

    def of(self, prompt_id: int) -> list[T]:
        """Return the parts of a group in order."""
        return list(self._by_prompt.get(prompt_id, {}).values())

    def answers(self, prompt_id: int) -> list[T]:
        """Return the finished answers of a group in order."""
        parts = self._by_prompt.get(prompt_id, {})
        return [where for key, where in parts.items() if key.kind == ANSWER]


class Appended:
    """A part that was appended; ``record`` says where it is, once the thread has written it.

    ``part``: the part itself, if its samples are in memory anyway. A new segment then has it,
    whatever became of the record.
    """

    __slots__ = ("meta", "part", "record")

    def __init__(
        self, meta: Mapping[str, Any], record: Record | None = None, part: Part | None = None
    ) -> None:
        self.meta, self.record, self.part = meta, record, part

    @property
    def key(self) -> PartKey:
        meta = self.meta
        return PartKey(meta["prompt_id"], meta["index"], meta["part"], meta["number"])


Waiting = Sequence[Record | Appended]
"""What a new segment copies: records still to be replayed, and parts of groups in generation."""


def content_of(part: Appended) -> bytes | None:
    """Return the content of a part; None, with a message, if its record is missing or damaged.

    Raises CheckpointError when the record cannot be read.
    """
    if part.part is not None:
        return part_content(part.part, part.meta)
    if part.record is None:
        return None  # its segment was given up, which was logged
    try:
        return part.record.content()
    except DamagedRecord as error:
        logger.warning("journal: %s", error)
        return None
