"""Standby ranks: processes that have imported a trainer rank's libraries, and wait for a death.

Input: the slots and GPUs of the ranks. Output: workers that a recovery uses instead of new ones, so
that it does not wait for imports. A standby has no CUDA context and no GPU memory; its
CUDA_VISIBLE_DEVICES is that of its rank from the start, because libraries may read it when they are
imported. It is used once; the next one is started after a step.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from rlpost.driver.placement import Placement
from rlpost.driver.startup import Startup
from rlpost.driver.workers import StandbyWorker, WorkerGroup

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Deadline to notice that a standby has ended; one that is still importing does not answer."""


class Standby:
    """At most one standby process for each rank."""

    def __init__(self, startup: Startup, *, wanted: bool | None) -> None:
        """``wanted``: --trainer-standby; None starts them where ranks have GPUs."""
        self._startup, self._wanted = startup, wanted
        self._group: WorkerGroup | None = None
        self._nodes: list[str] = []

    def start(self, placement: Placement, gpus: Sequence[str]) -> None:
        """Start the standbys that are wanted and missing; returns at once.

        ``gpus``: CUDA_VISIBLE_DEVICES of each rank.
        """
        wanted = any(gpus) if self._wanted is None else self._wanted
        if not wanted or self._group is not None:
            return
        self._nodes = [slot.node_id for slot in placement.actors]
        self._group = self._startup.standby_workers(placement, gpus)
        logger.info("standby processes started for %d trainer ranks", len(self._nodes))

    async def take(self, placement: Placement) -> dict[int, StandbyWorker]:
        """Return the standbys for ranks in these slots, by rank; kill the others."""
        group, self._group = self._group, None
        if group is None:
            return {}
        dead = await group.dead(ANSWER_S)
        nodes = [slot.node_id for slot in placement.actors]
        chosen = usable(self._nodes, nodes, dead)
        await group.kill([rank for rank in range(len(nodes)) if rank not in chosen])
        logger.info("standby processes take over %d of %d ranks", len(chosen), len(nodes))
        return {rank: group.standby(rank) for rank in chosen}


def usable(
    standbys: Sequence[str], ranks: Sequence[str], dead: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the ranks that start in their standby process.

    A standby is bound to the GPU of its rank. Ray assigns a GPU to a new process without knowing
    that, so a standby and a new process on one node could share a GPU: a node uses its standbys for
    all of its ranks, or for none.

    Args:
        standbys: the node of each standby, by rank.
        ranks: the node where each rank starts.
        dead: standbys that have ended.

    >>> usable(["a", "a", "b"], ["a", "a", "c"])
    (0, 1)
    >>> usable(["a", "a", "b"], ["a", "a", "b"], dead=[1])
    (2,)
    """
    fits = [
        rank not in dead and standby == node
        for rank, (standby, node) in enumerate(zip(standbys, ranks, strict=True))
    ]
    lacking = {node for node, is_there in zip(ranks, fits, strict=True) if not is_there}
    return tuple(rank for rank, node in enumerate(ranks) if node not in lacking)
