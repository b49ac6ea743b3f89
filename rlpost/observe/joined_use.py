"""GPU time of engines in other jobs, which extensions read from the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.ledger import Entry
from rlpost.config import extensions


@dataclass(frozen=True, slots=True)
class JoinedUse:
    """GPU-seconds of the engines of a group in other jobs: allocated, and serving."""

    allocated_gpu_s: float = 0.0
    served_gpu_s: float = 0.0


def joined_use(events: Sequence[Entry]) -> dict[str, JoinedUse]:
    """Return the GPU time of engines in other jobs, by group; ``events``: the ledger's entries."""
    use: dict[str, JoinedUse] = {}
    for each in extensions.extensions():
        if each.gpu_use is not None:
            use |= extensions.load(each.gpu_use)(events)
    return use
