"""GPU time of engines in other jobs: allocated, and spent serving. Pure.

Input: the ledger's entries, of which the ``fleet`` lines count. Output: GPU-seconds of each group.

The allocated time of a job is a counter of its agent over all attempts. It only grows, but restarts
from zero if the file of an engine was removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from common.fleet_name import POLICY, last_served
from common.ledger import Entry


@dataclass(frozen=True, slots=True)
class JoinedUse:
    """GPU-seconds of the engines of a group in other jobs: allocated, and serving."""

    allocated_gpu_s: float
    served_gpu_s: float


def joined_use(ledger: Sequence[Entry]) -> dict[str, JoinedUse]:
    """Return the GPU time of engines in other jobs by the group that they serve."""
    by_group: dict[str, list[Entry]] = defaultdict(list)
    for entry in ledger:
        if entry.get("event") == "fleet":
            by_group[entry.get("group", POLICY)].append(entry)
    return {group: _use(entries) for group, entries in by_group.items()}


def _use(ledger: Sequence[Entry]) -> JoinedUse:
    meters: dict[str, list[float]] = defaultdict(list)
    for entry in ledger:
        for engine, gpu_s in (entry.get("allocated") or {}).items():
            meters[engine].append(float(gpu_s))
    served_s = sum(float(entry.get("served_gpu_s") or 0.0) for entry in last_served(ledger))
    allocated_s = sum(map(_metered, meters.values()))
    # The last heartbeat of an agent may be older than the end of its service.
    return JoinedUse(max(allocated_s, served_s), served_s)


def _metered(readings: Sequence[float]) -> float:
    """Return the total of a counter that may restart from zero."""
    total = before = 0.0
    for reading in readings:
        total += reading - before if reading >= before else reading
        before = reading
    return total
