"""GPU time of engine jobs of fleets: allocated, and spent serving. Pure.

Input: the ledger's entries, of which the ``fleet`` lines count. Output: seconds in which each
engine served, and GPU-seconds of those of each group: allocated, and serving.

Each line of an attempt and a group replaces the one before for what served in that attempt. The allocated time
of a job is a counter of its agent over all attempts. It only grows, but restarts from zero if the
file of an engine was removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from common.fleet_name import POLICY
from common.ledger import Entry
from rlpost.observe.joined_use import JoinedUse


def used_of(ledger: Sequence[Entry]) -> dict[str, float]:
    """Return the seconds in which each engine served, summed over the attempts."""
    total: dict[str, float] = defaultdict(float)
    for entry in _last_of_attempts(ledger):
        for engine, seconds in entry["used"].items():
            total[engine] += float(seconds)
    return dict(total)


def fleet_use(ledger: Sequence[Entry]) -> dict[str, JoinedUse]:
    """Return the GPU-seconds of engine jobs by the group that they serve."""
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
    served_s = sum(float(entry.get("served_gpu_s") or 0.0) for entry in _last_of_attempts(ledger))
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


def _last_of_attempts(ledger: Sequence[Entry]) -> list[Entry]:
    last = {
        (str(entry.get("attempt")), entry.get("group")): entry
        for entry in ledger
        if entry.get("event") == "fleet" and "used" in entry
    }
    return list(last.values())
