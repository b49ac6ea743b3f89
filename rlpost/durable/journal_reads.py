"""Reads of the journal's records in threads, within deadlines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlpost.durable.daemon_threads import in_daemon, within
from rlpost.durable.journal_chain import Found, follow, read_folder
from rlpost.durable.journal_format import (
    BATCH,
    EVALUATION,
    FORMAT,
    GROUP,
    REWARD,
    DamagedRecord,
    Header,
    Part,
    PartKey,
    Record,
    unreadable_words,
)
from rlpost.durable.journal_segments import Segment, segment_paths
from rlpost.durable.segment_writer import deadline_s
from rlpost.errors import CheckpointError, ConfigError
from rlpost.types import Sample

logger = logging.getLogger(__name__)

T = TypeVar("T")
RESUMES_WITH = "0.2.0"
"""The newest version that reads segments of the formats before ``FORMAT``."""


def valid_parts(records: Iterable[Record]) -> list[Part]:
    """Read parts; leave out, with a message, those that are damaged now.

    Raises CheckpointError when one cannot be read.
    """
    parts = []
    for record in records:
        try:
            parts.append(record.part())
        except DamagedRecord as error:
            logger.warning("journal: %s", error)
    return parts


def with_rewards(answer: Part, rewards: Mapping[PartKey, Part]) -> Iterator[Sample]:
    """Yield the samples of an ANSWER, with those of the REWARDs that belong to them."""
    for number, sample in enumerate(answer.samples):
        reward = rewards.get(replace(answer.key, kind=REWARD, number=number))
        yield sample if reward is None else replace(sample, reward=reward.value["reward"])


async def read_all(folder: Path, act: Callable[[], T], what: str) -> T:
    """Like ``read_within``, for an ``act`` that reads all segments."""
    size = partial(_size, folder)
    num_bytes = await read_within(0, size, f"the journal folder {folder} was not listed")
    return await read_within(num_bytes, act, what)


async def read_within(num_bytes: int, act: Callable[[], T], what: str) -> T:
    """Return the result of ``act``, run in a thread with a deadline.

    ``num_bytes`` is how much ``act`` reads and copies. Raises CheckpointError after the deadline.
    """
    seconds = deadline_s(num_bytes)
    problem = (
        f"{what} within {seconds:.0f} s: the storage hangs; repair the storage or the mount. A requeue resumes "
        "from the same checkpoint and journal"
    )
    async with within(seconds, problem):
        return await in_daemon(act)


def _size(folder: Path) -> int:
    """Bytes of all segments; 0 when that is unknown."""
    try:
        return sum(path.stat().st_size for path in segment_paths(folder))
    except OSError:
        return 0  # ``resume`` reports the error


def read_tail(
    folder: Path, base: int, step: int, settings: str, data: str | None
) -> tuple[Sequence[Segment], Found, Header]:
    """Return all segments, what follows a state, and the header of the segment that continues it.

    See ``Journal.resume``, which raises the same. Segments and bytes that are not used are logged.
    """
    try:
        segments, unreadable = read_folder(folder)
    except OSError as error:
        raise CheckpointError(unreadable_words(folder, error)) from error
    for each in unreadable:
        if each.earlier and each.number >= base:
            raise ConfigError(
                f"{each.path}: {each.problem}; resume the run with rlpost {RESUMES_WITH} until its next "
                "checkpoint, or delete the file to generate its groups again"
            )
    tail = follow(segments, base, step, settings, data=data, unreadable=unreadable)
    for problem in tail.problems:
        logger.warning("journal: %s", problem)
    if tail.is_trained_otherwise:
        logger.warning(
            "journal: settings of the training have changed since: %s; what the weights of step %d "
            "have generated is used, and what later ones have is generated again",
            *("; ".join(tail.changes), step),
        )
    if tail.records:
        kinds = [record.kind for record in tail.records]
        logger.info(
            "journal: %d finished groups, %d batches and %d evaluations follow step %d",
            *(kinds.count(kind) for kind in (GROUP, BATCH, EVALUATION)),
            step,
        )
    paths = [each.path for each in segments] + [each.path for each in unreadable]
    header = Header(
        number=max([base - 1, *(int(path.stem) for path in paths)]) + 1,
        base=base,
        step=step,
        settings=settings,
        format=FORMAT,
        data=data,
        previous=tail.previous,
    )
    return segments, tail, header
