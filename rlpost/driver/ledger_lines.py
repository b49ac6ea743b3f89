"""Ledger entries of the driver, written off the event loop while it owns the run.

Input: events of an attempt. Output: lines of RUN/ledger.jsonl. A line that cannot be written is
retried with the next one: a failure to write the ledger never ends a run.

The start of an attempt has the lines ``started`` and ``ready``, once. A later driver of the attempt,
which replaces a dead one, adds ``recovered`` when it has trainer and engines again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from common.cluster import Cluster
from common.ledger import Ledger
from rlpost.config.tree import Config
from rlpost.durable.open_parts import Kept
from rlpost.durable.run_files import RunFile
from rlpost.observe.driver_lines import kept_words

NOTHING_KEPT = Kept(0, 0, 0, 0)
logger = logging.getLogger(__name__)

LOST = "reports and the supervisor miss the event"

Entry = Mapping[str, object]


class RecordEvent(Protocol):
    """Writes an event with JSON values into the ledger."""

    def __call__(self, event: str, **details: object) -> None:
        """Write it soon."""


def not_recorded(event: str, **details: object) -> None:
    """Drop an event: a ``RecordEvent`` for a run without a ledger."""


class LedgerLines:
    """Writes the ledger entries of one attempt."""

    def __init__(self, ledger: Ledger, *, check: Callable[[], None]) -> None:
        """``check`` raises Fenced when the run belongs to another attempt."""
        self._ledger = ledger
        self._file = RunFile(ledger.path, lost=LOST, check=check)

    async def append(self, event: str, **details: object) -> bool:
        """Add a line; False when it is not on disk within the deadline. Raises Fenced."""
        return await self._file.do(partial(self._ledger.append, event, **details))

    def soon(self, event: str, **details: object) -> None:
        """Like ``append``, but return immediately."""
        self._file.soon(partial(self._ledger.append, event, **details))

    def finish(self, event: str, **details: object) -> bool:
        """Like ``append``, for the last line and without an event loop."""
        is_written = self._file.finish(partial(self._ledger.append, event, **details))
        if not is_written:
            logger.error("this event could not be written to the ledger: %s", event)
        return is_written

    def entries(self) -> list[dict[str, object]]:
        """Return all valid entries; damaged lines are logged. Raises OSError."""
        for problem in self._ledger.damage():
            logger.warning("%s: %s; it is left out", self._ledger.path, problem)
        return self._ledger.read()

    def close(self) -> None:
        """Retry failed writes once."""
        self._file.close()


class StartLines:
    """Writes the lines about the start of one driver."""

    def __init__(self, ledger: LedgerLines, cluster: Cluster, entries: Sequence[Entry]) -> None:
        """``entries``: all of the ledger."""
        self._ledger, self._cluster = ledger, cluster
        self._attempt = Path(cluster.attempt_dir).name
        self._entries = list(entries)

    async def record_start(
        self,
        config: Config,
        step: int,
        again: Mapping[str, float] | None,
        changed: Sequence[str] = (),
    ) -> Sequence[Entry]:
        """Record that the driver has the cluster; return all entries.

        ``again``: the steps after ``step`` that are trained again. ``changed``: settings that
        decide results and have other values than before, one a line.
        """
        if not self._has("started"):
            line = {
                "attempt": self._attempt,
                "step": step,
                "nodes": [node.host for node in self._cluster.nodes],
                "gpus": gpus_by_role(config),
                "again": again,
                "changed": list(changed),
            }
            await self._ledger.append("started", **line)
            self._entries.append({"event": "started", **line})
        return self._entries

    async def record_ready(self, step: int, again: Mapping[str, float] | None) -> None:
        """Record that trainer and engines answer.

        ``seconds`` in the ledger are those since the death of the driver before.
        """
        cluster = self._cluster
        if cluster.incarnation:
            await self._ledger.append(
                "recovered",
                role="driver",
                attempt=self._attempt,
                incarnation=cluster.incarnation,
                cause=f"the driver died: {cluster.died_of}",
                step=step,
                seconds=round(max(0.0, time.time() - cluster.died_at), 3),
                steps_again=None if again is None else int(again["steps"]),
                again=again,
            )
        if not self._has("ready"):
            await self._ledger.append("ready", attempt=self._attempt, step=step)

    async def record_kept(self, kept: Kept) -> None:
        """Record what this driver continues of the groups that were in generation."""
        if kept != NOTHING_KEPT:
            logger.info("journal: %s", kept_words(asdict(kept)))
            await self._ledger.append(
                "kept",
                attempt=self._attempt,
                incarnation=self._cluster.incarnation,
                **asdict(kept),
            )

    def _has(self, event: str) -> bool:
        """Whether an earlier driver of this attempt wrote ``event``."""
        return self._cluster.incarnation > 0 and any(
            entry.get("event") == event and str(entry.get("attempt")) == self._attempt
            for entry in self._entries
        )


def gpus_by_role(config: Config) -> dict[str, Any]:
    """The GPUs of an attempt by role: run.json changes when a run is resumed with other GPUs."""
    return {
        "per_node": config.cluster.num_gpus_per_node,
        "trainer": config.actor_world_size,
        "engines": config.rollout_num_gpus,
        "groups": config.gpus_by_group,
    }
