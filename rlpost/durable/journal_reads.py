"""Reads of the journal's records in threads, within deadlines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlpost.durable.daemon_threads import in_daemon, within
from rlpost.durable.journal_format import REWARD, DamagedRecord, Part, PartKey, Record
from rlpost.durable.journal_segments import segment_paths
from rlpost.durable.segment_writer import deadline_s
from rlpost.types import Sample

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
