"""Episodes of a run on disk: one JSON object a line in ``RUN/episodes.jsonl``.

Input: records of episodes. Output: the file, written in a thread. A line may be missing after a
crash, and an episode that was generated again has several; the last one is the one that was trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.files import write_all
from rlpost.durable.run_files import RunFile
from rlpost.observe.samples import cut

MAX_TEXT = 20_000  # characters of one text in a record
MAX_WAITING = 10_000  # records in memory while storage hangs


class EpisodeFile:
    """Appends records without blocking the event loop; a lost record never ends a run."""

    def __init__(self, path: Path, *, check: Callable[[], None] = lambda: None) -> None:
        """``check`` raises Fenced when another attempt owns the run."""
        self._path = path
        self._file = RunFile(
            path, lost="episodes are not recorded", check=check, max_waiting=MAX_WAITING
        )

    def write(self, record: Mapping[str, object]) -> None:
        self._file.soon(partial(_append, self._path, shortened(record)))

    def close(self) -> None:
        """Wait for pending writes."""
        self._file.close()


def shortened(value: object) -> Any:
    """Return a JSON value in which the middle of each long text is left out."""
    if isinstance(value, str):
        return cut(value, MAX_TEXT)
    if isinstance(value, Mapping):
        return {key: shortened(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(each) for each in value]
    return value


def _append(path: Path, record: Mapping[str, object]) -> None:
    line = json.dumps(record, ensure_ascii=False, default=str) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        write_all(handle, line.encode("utf-8", "replace"))
    finally:
        os.close(handle)
