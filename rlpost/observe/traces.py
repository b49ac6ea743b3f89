"""Episodes of a run on disk: one JSON object a line in ``RUN/episodes.jsonl``.

Input: records of episodes. Output: the file, written in a thread; and for the report its newest
records. A line may be missing after a crash, and an episode that was generated again has several;
the last one is the one that was trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.files import open_regular, write_all
from rlpost.durable.run_files import RunFile
from rlpost.observe.samples import cut

FILE_NAME = "episodes.jsonl"
MAX_TEXT = 20_000  # characters of one text in a record
MAX_READ = 32 << 20  # bytes at the end of the file that a report reads
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
        """Queue a record."""
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


def read_episodes(path: Path) -> list[dict[str, object]]:
    """Return the newest records of a file in order; of one episode the last. Empty without a file.

    Truncated or damaged lines are skipped.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_READ))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    if size > MAX_READ:
        lines = lines[1:]
    episodes: dict[tuple[object, ...], dict[str, object]] = {}
    for line in lines:
        try:
            record = json.loads(line)
            key: tuple[object, ...] = (None, record["prompt_id"], record["index"])
            if record.get("evaluation") is not None:  # the same prompt, at several steps
                key = (record["evaluation"], *key[1:], record["began"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        episodes.pop(key, None)
        episodes[key] = record
    return list(episodes.values())


def chosen(records: Sequence[Mapping[str, Any]], *, most: int) -> list[Mapping[str, object]]:
    """Return the records that a report shows, newest first.

    These are, for each environment, the newest failed ones and the newest with its best and its
    worst reward, as many of each kind as ``most`` allows.
    """
    kinds: dict[tuple[object, str], list[int]] = {}
    rewards: dict[object, list[float]] = {}
    for record in records:
        if record.get("outcome") == "scored":
            rewards.setdefault(record.get("env"), []).append(record["reward"])
    for position, record in enumerate(records):
        env, outcome = record.get("env"), record.get("outcome")
        if outcome != "scored":
            kinds.setdefault((env, "failed"), []).append(position)
        elif record["reward"] == max(rewards[env]):
            kinds.setdefault((env, "best"), []).append(position)
        elif record["reward"] == min(rewards[env]):
            kinds.setdefault((env, "worst"), []).append(position)
    each = max(1, most // max(1, len(kinds)))
    positions = sorted({number for own in kinds.values() for number in own[-each:]}, reverse=True)
    return [records[number] for number in positions[:most]]


def summary(records: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a line for each environment: episodes, failed, timeouts, turns, tokens, reward."""
    by_env: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_env.setdefault(str(record.get("env")), []).append(record)
    lines = []
    for env, own in sorted(by_env.items()):
        scored = [record for record in own if record.get("outcome") == "scored"]
        count = max(1, len(scored))
        lines.append(
            {
                "env": env,
                "episodes": len(own),
                "failed": len(own) - len(scored),
                "timeouts": sum(record.get("outcome") == "timeout" for record in own),
                "turns": sum(len(record["turns"]) for record in scored) / count,
                "tokens": sum(record["tokens"] for record in scored) / count,
                "seconds": sum(record["seconds"] for record in scored) / count,
                "reward": sum(record["reward"] for record in scored) / count,
            }
        )
    return lines
