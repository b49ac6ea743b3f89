"""The weight-update plan of every rank, from the facts of all ranks.

In a run the pipeline stages exchange what they hold before the plan is made; here the exchange is a look-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlpost.rehearsal.facts import RankFacts
from rlpost.types import Bucket
from rlpost.weights.exporter import Exporter, in_buckets
from rlpost.weights.inventory import Entry, in_order
from rlpost.weights.quantise import BlockFp8
from rlpost.weights.sync import Buckets

Plan = tuple[Bucket, ...]


class _PlanOnly(Exporter):
    """An exporter of weights that are on no rank here: it plans and gathers nothing."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries

    def plan(self, max_bytes: int) -> tuple[tuple[Entry, ...], ...]:
        return in_buckets(self.entries, max_bytes)


def update_plans(
    ranks: Mapping[int, RankFacts], *, bucket_bytes: int, quantisation: BlockFp8 | None = None
) -> dict[int, Plan]:
    """The plan of each rank whose pipeline group is complete in ``ranks``; equal inputs share one plan."""
    made: dict[tuple[tuple[Entry, ...], ...], Plan] = {}
    plans: dict[int, Plan] = {}
    for rank, facts in ranks.items():
        peers = facts.groups["pipeline"]
        if not all(peer in ranks for peer in peers):
            continue
        stages = tuple(ranks[peer].entries for peer in peers)
        if stages not in made:
            exporter = _PlanOnly(in_order(stages))
            made[stages] = Buckets(exporter, bucket_bytes=bucket_bytes, quantisation=quantisation).plan()
        plans[rank] = made[stages]
    return plans
