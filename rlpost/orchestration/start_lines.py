"""The ledger's lines about the start of an attempt, and of each driver that replaces a dead one.

Input: the cluster, the entries so far. Output: ``started`` and ``ready`` once for each attempt, and
``recovered`` when a later driver of the attempt has trainer and engines again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.cluster import Cluster
from rlpost.config.tree import Config
from rlpost.orchestration.ledger_lines import LedgerLines

Entry = Mapping[str, object]


class StartLines:
    """Writes the lines of one driver."""

    def __init__(self, ledger: LedgerLines, cluster: Cluster, entries: Sequence[Entry]) -> None:
        """``entries``: all of the ledger."""
        self._ledger, self._cluster = ledger, cluster
        self._attempt = Path(cluster.attempt_dir).name
        self._entries = list(entries)

    async def started(
        self, config: Config, step: int, again: Mapping[str, float] | None
    ) -> Sequence[Entry]:
        """Record that the driver has the cluster; return all entries.

        ``again``: the steps after ``step`` that are trained again.
        """
        if not self._has("started"):
            line = {
                "attempt": self._attempt,
                "step": step,
                "nodes": [node.host for node in self._cluster.nodes],
                "gpus": gpus_by_role(config),
                "again": again,
            }
            await self._ledger.append("started", **line)
            self._entries.append({"event": "started", **line})
        return self._entries

    async def ready(self, step: int, again: Mapping[str, float] | None) -> None:
        """Record that trainer and engines answer."""
        if self._cluster.incarnation:
            await self._ledger.append("recovered", **recovered_line(self._cluster, step, again))
        if not self._has("ready"):
            await self._ledger.append("ready", attempt=self._attempt, step=step)

    def _has(self, event: str) -> bool:
        """Whether an earlier driver of this attempt wrote ``event``."""
        return self._cluster.incarnation > 0 and any(
            entry.get("event") == event and str(entry.get("attempt")) == self._attempt
            for entry in self._entries
        )


def recovered_line(
    cluster: Cluster, step: int, again: Mapping[str, float] | None
) -> dict[str, object]:
    """The details of ``recovered``; ``seconds`` are those since the death of the driver."""
    return {
        "role": "driver",
        "attempt": Path(cluster.attempt_dir).name,
        "incarnation": cluster.incarnation,
        "cause": f"the driver died: {cluster.died_of}",
        "step": step,
        "seconds": round(max(0.0, time.time() - cluster.died_at), 3),
        "steps_again": None if again is None else int(again["steps"]),
        "again": again,
    }


def gpus_by_role(config: Config) -> dict[str, int]:
    """The GPUs of an attempt by role: run.json changes when a run is resumed with other GPUs."""
    return {
        "per_node": config.cluster.num_gpus_per_node,
        "trainer": config.num_training_gpus,
        "engines": config.rollout_num_gpus,
    }
