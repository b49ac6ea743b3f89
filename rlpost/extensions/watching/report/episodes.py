"""The newest episodes of a run for its page, from ``RUN/episodes.jsonl``. Pure but for the reading."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files import open_regular

MAX_READ = 32 << 20  # bytes at the end of the file that a report reads


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
    positions = sorted(
        {number for numbers in kinds.values() for number in numbers[-each:]}, reverse=True
    )
    return [records[number] for number in positions[:most]]


def summary(records: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a line for each environment: episodes, failed, timeouts, turns, tokens, reward."""
    by_env: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_env.setdefault(str(record.get("env")), []).append(record)
    lines = []
    for env, episodes in sorted(by_env.items()):
        scored = [record for record in episodes if record.get("outcome") == "scored"]
        count = max(1, len(scored))
        lines.append(
            {
                "env": env,
                "episodes": len(episodes),
                "failed": len(episodes) - len(scored),
                "timeouts": sum(record.get("outcome") == "timeout" for record in episodes),
                "turns": sum(len(record["turns"]) for record in scored) / count,
                "tokens": sum(record["tokens"] for record in scored) / count,
                "seconds": sum(record["seconds"] for record in scored) / count,
                "reward": sum(record["reward"] for record in scored) / count,
            }
        )
    return lines
