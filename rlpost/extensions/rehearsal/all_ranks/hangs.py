"""Decide from the recordings of all ranks whether a step would hang. Pure.

Input: the calls of every rank. Output: faults, the first one in time first. Three questions:

1. Does every member of a group issue the same collectives, with matching sizes, in the same order?
2. Does every send of a pipeline stage meet a receive of the same size, in order?
3. Does every rank finish if a collective waits for all members? Two ranks that enter two
   groups in opposite orders pass the first question and hang.

The odd rank of a mismatch is the one whose sequence of calls fewest ranks share, counted over all
groups with the same number of members.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlpost.extensions.rehearsal.all_ranks.distributed_calls import (
    POINT_TO_POINT,
    SEND,
    SPLIT,
    Call,
    Recording,
    by_group,
)

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One mismatch.

    Attributes:
        ranks: those that deviate.
        group: the ranks that would wait.
        position: index of the call in the calls of the first deviating rank, for order in time.
        line: the line that issued the deviating call, or that issued the call which is missing.
        message: one sentence.
    """

    ranks: tuple[int, ...]
    group: Group
    position: int
    line: str
    message: str


def hangs(recordings: Mapping[int, Recording]) -> list[Fault]:
    """All faults; empty when the step finishes."""
    faults = [*collective_faults(recordings), *transfer_faults(recordings)]
    if not faults:
        faults = list(order_faults(recordings))
    return sorted(faults, key=lambda one: (one.position, one.ranks))


def collective_faults(recordings: Mapping[int, Recording]) -> Iterable[Fault]:
    """The first mismatch of each group."""
    sequences = {rank: by_group(recording.calls) for rank, recording in recordings.items()}
    groups = {group for rank_calls in sequences.values() for group in rank_calls}
    commonness = _commonness(sequences)
    for group in sorted(groups):
        if not recordings.keys() >= set(group):
            continue
        group_calls = {rank: sequences[rank].get(group, []) for rank in group}
        strangers = [
            rank for rank, calls in sequences.items() if rank not in group and group in calls
        ]
        for rank in strangers:
            call = sequences[rank][group][0]
            yield _fault(
                recordings, (rank,), call, f"rank {rank} calls {call.text} on a group it is not in"
            )
        if fault := _mismatch(recordings, group, group_calls, commonness):
            yield fault


def _mismatch(
    recordings: Mapping[int, Recording],
    group: Group,
    group_calls: Mapping[int, Sequence[Call]],
    commonness: Mapping[int, int],
) -> Fault | None:
    """The first position at which the members do not agree."""
    longest = max(len(calls) for calls in group_calls.values())
    agreed = {rank: [call.agreed for call in calls] for rank, calls in group_calls.items()}
    first = agreed[group[0]]
    if all(calls == first for calls in agreed.values()):
        return _wrong_split(recordings, group, group_calls, commonness)
    lines = {rank: [call.line for call in calls] for rank, calls in group_calls.items()}
    for position in range(longest):
        keys: dict[int, object] = dict.fromkeys(group)
        for rank in group:
            if position < len(agreed[rank]):
                keys[rank] = agreed[rank][position], lines[rank][position]
        if len(set(keys.values())) > 1 and _is_real(agreed, lines, position):
            return _told(recordings, group, group_calls, _odd(keys, commonness), position)
    raise AssertionError("the sequences differ, so one position does")


def _is_real(
    agreed: Mapping[int, Sequence[object]], lines: Mapping[int, Sequence[str]], position: int
) -> bool:
    """Whether the members diverge here, and not only issue one call from two lines.

    A source and its receivers may have different lines. They diverge if the calls differ here, or
    if the lines differ and an earlier rank repeats the call at the next position of the others.
    """
    here = {calls[position] if position < len(calls) else None for calls in agreed.values()}
    if len(here) > 1:
        return True
    lengths = {len(calls) for calls in agreed.values()}
    known = [frozenset(rank_lines) for rank_lines in lines.values()]
    shared = known[0].intersection(*known[1:])
    now = {rank_lines[position] for rank_lines in lines.values()}
    return len(lengths) > 1 and bool(now & shared)


def _odd(keys: Mapping[int, object], commonness: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks with the rarest key; among equally rare ones those with the rarest sequence."""
    count = Counter(keys.values())
    rarest = min(count.values())
    candidates = [rank for rank, key in keys.items() if count[key] == rarest]
    fewest = min(commonness[rank] for rank in candidates)
    chosen = [rank for rank in candidates if commonness[rank] == fewest]
    return tuple(rank for rank in chosen if keys[rank] == keys[chosen[0]])


def _told(
    recordings: Mapping[int, Recording],
    group: Group,
    calls: Mapping[int, Sequence[Call]],
    odd: tuple[int, ...],
    position: int,
) -> Fault:
    other = next(rank for rank in group if rank not in odd)
    theirs = calls[other][position] if position < len(calls[other]) else None
    mine = calls[odd[0]][position] if position < len(calls[odd[0]]) else None
    who, call = _ranks(odd), mine or theirs
    assert call is not None
    number = f"call {position + 1} on the group of ranks {_ends(group)}"
    if mine is None:
        assert theirs is not None
        message = f"{who} never issues {number}: {theirs.text} at {theirs.line}"
    elif theirs is None:
        message = f"{who} issues {mine.text} at {mine.line}, as {number}, and the others do not"
    elif _comes_later(mine, calls[other][position:]):
        call = theirs
        message = (
            f"{who} leaves out {number}: {theirs.text} at {theirs.line}; it continues with {mine.text} "
            f"at {mine.line}"
        )
    elif mine.line == theirs.line:
        message = f"{number} at {mine.line}: {who} has {mine.text}, rank {other} has {theirs.text}"
    else:
        message = (
            f"{number}: {who} is at {mine.line} with {mine.text}, "
            f"rank {other} at {theirs.line} with {theirs.text}"
        )
    at = _position(recordings[odd[0]], mine, calls[odd[0]])
    return Fault(odd, group, at, call.line, f"{call.phase}: {message}")


def _comes_later(call: Call, others: Sequence[Call]) -> bool:
    """Whether the other ranks issue the same call from the same line after their next one."""
    key = (call.agreed, call.line)
    now, *later = [(one.agreed, one.line) for one in others]
    return now != key and key in later


def _position(recording: Recording, call: Call | None, of_group: Sequence[Call]) -> int:
    """Index of a call of the rank; of a missing one, that after its last call on the group."""
    if call is None and not of_group:
        return 0
    return _index(recording, of_group[-1] if call is None else call)


def _index(recording: Recording, call: Call) -> int:
    """Find a call by identity: equal calls may occur several times."""
    return next(at for at, one in enumerate(recording.calls) if one is call)


def _wrong_split(
    recordings: Mapping[int, Recording],
    group: Group,
    group_calls: Mapping[int, Sequence[Call]],
    commonness: Mapping[int, int],
) -> Fault | None:
    """An all-to-all in which a rank sends other numbers of rows than the others receive."""
    for position, call in enumerate(group_calls[group[0]]):
        if call.kind != SPLIT:
            continue
        calls = [group_calls[rank][position] for rank in group]
        for sender, mine in enumerate(calls):
            for receiver, theirs in enumerate(calls):
                if mine.sent[receiver] != theirs.received[sender]:
                    message = (
                        f"all_to_all at {mine.line}: rank {group[sender]} sends {mine.sent[receiver]} rows to "
                        f"rank {group[receiver]}, which expects {theirs.received[sender]}"
                    )
                    pair = (group[sender], group[receiver])
                    fewest = min(commonness[rank] for rank in pair)
                    odd = tuple(rank for rank in pair if commonness[rank] == fewest)
                    at = _index(recordings[odd[0]], group_calls[odd[0]][position])
                    return Fault(odd, group, at, mine.line, f"{call.phase}: {message}")
    return None


def _commonness(sequences: Mapping[int, Mapping[Group, Sequence[Call]]]) -> dict[int, int]:
    """For each rank, how many ranks have the same calls apart from the numbers of ranks."""
    shapes = {}
    for rank, of_rank in sequences.items():
        per_size = []
        for group, calls in of_rank.items():
            found = tuple((call.agreed, call.line, call.sent) for call in calls)
            per_size.append((len(group), found))
        shapes[rank] = hash(tuple(sorted(per_size, key=str)))
    count = Counter(shapes.values())
    return {rank: count[shape] for rank, shape in shapes.items()}


def transfer_faults(recordings: Mapping[int, Recording]) -> Iterable[Fault]:
    """The first transfer between each pair of ranks that does not fit."""
    sent: dict[tuple[Group, int, int], list[Call]] = defaultdict(list)
    received: dict[tuple[Group, int, int], list[Call]] = defaultdict(list)
    for rank, recording in recordings.items():
        for call in recording.calls:
            if call.kind not in POINT_TO_POINT or call.root is None:
                continue
            peer = call.group[call.root]
            if call.kind == SEND:
                sent[call.group, rank, peer].append(call)
            else:
                received[call.group, peer, rank].append(call)
    for pair in sorted(sent.keys() | received.keys()):
        _, source, target = pair
        if source not in recordings or target not in recordings:
            continue
        yield from _unmet(recordings, sent[pair], received[pair], source, target)


def _unmet(
    recordings: Mapping[int, Recording],
    sends: Sequence[Call],
    receives: Sequence[Call],
    source: int,
    target: int,
) -> Iterable[Fault]:
    for number, (mine, theirs) in enumerate(zip(sends, receives, strict=False), start=1):
        if (mine.sizes, mine.dtype) != (theirs.sizes, theirs.dtype):
            message = (
                f"transfer {number} from rank {source} to rank {target}: {mine.text} at {mine.line}, but the "
                f"receiver expects {theirs.text} at {theirs.line} ({len(sends)} sends, "
                f"{len(receives)} receives)"
            )
            yield _fault(recordings, (source, target), mine, message)
            return
    if len(sends) > len(receives):
        extra = sends[len(receives)]
        message = (
            f"rank {source} sends {len(sends)} times to rank {target}, which receives "
            f"{len(receives)} times; the first without a receive is {extra.text} at {extra.line}"
        )
        yield _fault(recordings, (source, target), extra, message)
    elif len(receives) > len(sends):
        extra = receives[len(sends)]
        message = (
            f"rank {target} waits {len(receives)} times for rank {source}, which sends "
            f"{len(sends)} times; the first without a sender is {extra.text} at {extra.line}"
        )
        yield _fault(recordings, (target, source), extra, message)


def order_faults(recordings: Mapping[int, Recording]) -> Iterable[Fault]:
    """Ranks that wait for each other in a circle, found by letting every rank run as far as it can.

    A collective completes when all members have entered it. Transfers do not block here: Megatron
    issues them in batches.
    """
    waiting = {
        rank: [call for call in recording.calls if call.blocks]
        for rank, recording in recordings.items()
    }
    at = dict.fromkeys(waiting, 0)
    ready = set(waiting)
    arrived: dict[Group, set[int]] = defaultdict(set)
    while ready:
        rank = ready.pop()
        if at[rank] == len(waiting[rank]):
            continue
        group = waiting[rank][at[rank]].group
        arrived[group].add(rank)
        if arrived[group] >= set(group) & set(waiting):
            arrived[group].clear()
            for member in set(group) & set(waiting):
                at[member] += 1
                ready.add(member)
    stuck = [rank for rank in sorted(waiting) if at[rank] < len(waiting[rank])]
    if stuck:
        rank = min(stuck, key=lambda one: at[one])
        call = waiting[rank][at[rank]]
        others = [one for one in stuck if one in call.group and one != rank]
        away = next((one for one in others if waiting[one][at[one]].group != call.group), others[0])
        theirs = waiting[away][at[away]]
        message = (
            f"ranks {_ends(tuple(stuck))} wait for each other: rank {rank} is in {call.text} at {call.line}, "
            f"rank {away} in {theirs.text} of another group at {theirs.line}"
        )
        yield _fault(recordings, (rank, away), call, message)


def _fault(
    recordings: Mapping[int, Recording], ranks: tuple[int, ...], call: Call, message: str
) -> Fault:
    """A fault at a call of the first of ``ranks``."""
    position = _index(recordings[ranks[0]], call)
    return Fault(ranks, call.group, position, call.line, f"{call.phase}: {message}")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ends(group: Group) -> str:
    """The members, shortened in the middle."""
    if len(group) <= 8:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:3]))} ... {group[-1]} ({len(group)})"
