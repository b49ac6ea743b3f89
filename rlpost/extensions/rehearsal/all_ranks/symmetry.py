"""Put ranks that do the same into classes, so that two of each represent it. Pure.

Two ranks are of one class if they are on the same pipeline stage, hold weights of the same shapes,
are in groups of the same sizes, and have the same part in a weight update; all ranks rehearse the
same micro-batches. On the last stage they also have the same context-parallel rank: log-probs are
computed of responses alone, and the chunks of a rank hold more or fewer of them. The code of a step
branches on nothing else. This is verified: the first and the last rank of each class run,
which differ in every coordinate that a class leaves open, and if the recording of one does not
become that of the other by exchanging their groups, all ranks of the class run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlpost.extensions.rehearsal.all_ranks.distributed_calls import Recording, translated
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recordings of all ranks, and which of them ran."""

    recordings: Mapping[int, Recording]
    ran: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]


def classes(facts: Mapping[int, RankFacts], *, all_gather: bool = False) -> list[tuple[int, ...]]:
    """The ranks in classes, in ascending order.

    With ``all_gather`` every rank has the same part in a weight update: engines share the GPUs.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, of_rank in sorted(facts.items()):
        key = (_key(of_rank), None if all_gather else of_rank.update)
        found.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def record(
    facts: Mapping[int, RankFacts],
    run: Callable[[int], Recording],
    *,
    all_ranks: bool,
    all_gather: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Recorded:
    """Record every rank, or two of each class.

    ``run`` runs one rank. ``say`` is called with the reason where all ranks of a class run. For
    ``all_gather`` see ``classes``.
    """
    recordings: dict[int, Recording] = {}
    ran: list[int] = []
    rank_classes = classes(facts, all_gather=all_gather)
    groups = {rank: rank_facts.groups for rank, rank_facts in facts.items()}
    for members in rank_classes:
        first, last = members[0], members[-1]
        chosen = members if all_ranks else dict.fromkeys((first, last))
        mine = class_recordings = {rank: run(rank) for rank in chosen}
        if len(mine) < len(members):
            try:
                class_recordings = _copies(mine[first], mine[last], members, groups)
            except ValueError as error:
                say(f"all of the ranks {first} to {last} that are alike run: {error}")
                mine = class_recordings = mine | {
                    rank: run(rank) for rank in members if rank not in mine
                }
        ran += mine
        recordings |= class_recordings
    return Recorded(dict(sorted(recordings.items())), tuple(sorted(ran)), tuple(rank_classes))


def _copies(
    first: Recording,
    last: Recording,
    members: tuple[int, ...],
    groups: Mapping[int, Mapping[str, tuple[int, ...]]],
) -> dict[int, Recording]:
    """The recordings of a class from those of two members; ValueError if these two differ."""
    expected = translated(first, last.rank, groups).calls
    if expected != last.calls:
        pairs = enumerate(zip(expected, last.calls, strict=False))
        number = next((at for at, (one, other) in pairs if one != other), len(expected))
        theirs = last.calls[number].text if number < len(last.calls) else "no call"
        ours = expected[number].text if number < len(expected) else "no call"
        raise ValueError(
            f"call {number} of rank {first.rank} is {ours}, that of rank {last.rank} is {theirs}"
        )
    copies = {rank: translated(first, rank, groups) for rank in members}
    return copies | {first.rank: first, last.rank: last}


def _key(facts: RankFacts) -> tuple[object, ...]:
    weights = tuple(
        (one.layout, one.shape, one.dim, one.num_shards, one.is_expert, one.is_trained)
        for one in (*facts.weights, *facts.adapters)
    )
    sizes = tuple(sorted((kind, len(group)) for kind, group in facts.groups.items()))
    stages = facts.groups["pipeline"]
    context = facts.groups["context"].index(facts.rank) if facts.rank == stages[-1] else None
    return stages.index(facts.rank), context, weights, sizes
