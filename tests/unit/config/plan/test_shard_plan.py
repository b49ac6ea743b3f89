"""Who sends which box to whom: every needed element once, balanced, in bounded buckets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.config.plan import shard_plan
from rlpost.config.plan.shard_balance import Balance, Part, Piece, Transfer
from rlpost.config.plan.shard_plan import (
    SentTensor,
    Unit,
    check_complete,
    joined_units,
    plan_shards,
)
from rlpost.config.plan.shard_roles import rank_plans, receiver_plans
from rlpost.config.plan.whole_tensors import whole_plan
from rlpost.errors import WeightError
from rlpost.models.regions import (
    Box,
    BoxGroup,
    Region,
    contiguous,
    disjoint,
    grouped,
    whole,
)

NUM_SENDERS, NUM_RECEIVERS = 4, 3
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


def indices(box: Box) -> list[tuple[int, ...]]:
    spans = [range(start, start + size) for start, size in zip(box.start, box.size, strict=True)]
    return list(itertools.product(*spans))


def groups(ranks: Sequence[Sequence[Region]]) -> list[list[BoxGroup]]:
    return [grouped(regions) for regions in ranks]


def sub_boxes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    def span(length: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, length - 1), st.integers(1, length)).map(
            lambda edge: (edge[0], min(edge[1], length - edge[0]))
        )

    return st.tuples(*map(span, shape))


def part(name: str, spans: tuple[tuple[int, int], ...]) -> Box:
    return Box(name, tuple(start for start, _ in spans), tuple(size for _, size in spans))


@st.composite
def updates(draw):
    """Tensors of several dtypes, held in halves or as a whole by some ranks, and what others need.

    The needed boxes of a rank overlap at times, as those of two parameters with the same tensor.
    """
    units, sources = [], [[] for _ in range(NUM_SENDERS)]
    sinks = [[] for _ in range(NUM_RECEIVERS)]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        tensor = SentTensor(f"t{number}", shape, draw(st.sampled_from(DTYPES)))
        units.append(Unit(draw(st.integers(0, 1)), (tensor,)))
        halves = [whole(tensor.name, shape).box]
        if shape and shape[0] > 1 and draw(st.booleans()):
            middle, rest = draw(st.integers(1, shape[0] - 1)), shape[1:]
            start = (0,) * len(rest)
            halves = [
                Box(tensor.name, (0, *start), (middle, *rest)),
                Box(tensor.name, (middle, *start), (shape[0] - middle, *rest)),
            ]
        for half in halves:
            for rank in draw(st.sets(st.integers(0, NUM_SENDERS - 1), min_size=1)):
                sources[rank].append(contiguous(half, "p"))
        for rank in range(NUM_RECEIVERS):
            kind = draw(st.sampled_from(["boxes", "by name", "nothing"]))
            if kind == "by name":
                sinks[rank].append(whole(tensor.name, shape))
            elif kind == "boxes":
                for spans in draw(st.lists(sub_boxes(shape), min_size=1, max_size=2)):
                    sinks[rank].append(contiguous(part(tensor.name, spans), "p"))
    return units, sources, sinks


@given(updates(), st.integers(1, 300), st.booleans())
def test_every_needed_element_comes_once_from_a_rank_that_holds_it(update, max_bytes, colocated):
    units, sources, sinks = update
    beside = {rank: rank for rank in range(NUM_RECEIVERS)} if colocated else {}
    plan = plan_shards(units, groups(sources), groups(sinks), max_bytes=max_bytes, beside=beside)
    held = [{(one.tensor, at) for one in of_rank for at in indices(one.box)} for of_rank in sources]
    needed = [{(one.tensor, at) for one in of_rank for at in indices(one.box)} for of_rank in sinks]
    received = [[] for _ in sinks]
    for message in itertools.chain.from_iterable(plan.buckets):
        elements = [(box.tensor, at) for box in message.boxes for at in indices(box)]
        assert held[message.sender].issuperset(elements)
        if colocated and message.sender != message.receiver:
            assert held[message.receiver].isdisjoint(elements), "what is there is not sent"
        received[message.receiver] += elements
        widths = [plan.element_bytes[box.tensor] for box in message.boxes]
        assert widths == sorted(widths, reverse=True), "else bytes are not aligned"
    for got, wanted in zip(received, needed, strict=True):
        assert sorted(got) == sorted(wanted)
    assert plan == plan_shards(
        units, groups(sources), groups(sinks), max_bytes=max_bytes, beside=beside
    )


@given(updates(), st.integers(1, 300))
def test_a_tensor_that_is_loaded_by_name_is_in_one_bucket(update, max_bytes):
    units, sources, sinks = update
    names = [unit.tensors[0].name for unit in units]
    units = joined_units(units, [names[:2]])
    assert sum(len(unit.tensors) for unit in units) == len(names)
    plan = plan_shards(units, groups(sources), groups(sinks), max_bytes=max_bytes)
    by_name = {one.tensor for of_rank in sinks for one in of_rank if not one.parameter}
    buckets: dict[str, set[int]] = {}
    for number, bucket in enumerate(plan.buckets):
        for box in itertools.chain.from_iterable(message.boxes for message in bucket):
            buckets.setdefault(box.tensor, set()).add(number)
    together = set(names[:2])
    for unit in [together, *({name} for name in names[2:])]:
        if unit & by_name:
            assert len(set().union(*(buckets.get(name, set()) for name in unit))) <= 1


@given(updates(), st.booleans())
def test_both_sides_of_a_message_have_the_same_boxes_in_the_same_order(update, colocated):
    units, sources, sinks = update
    beside = {rank: rank for rank in range(NUM_RECEIVERS)} if colocated else {}
    plan = plan_shards(units, groups(sources), groups(sinks), max_bytes=40, beside=beside)
    ranks = rank_plans(plan, [frozenset()] * NUM_SENDERS)
    for receiver, buckets in enumerate(receiver_plans(plan, NUM_RECEIVERS)):
        for number, messages in enumerate(buckets):
            sent = {
                rank: boxes
                for rank, of_rank in enumerate(ranks)
                for to, boxes in of_rank.outgoing[number]
                if to == receiver
            }
            if not colocated:
                assert dict(messages) == sent
                continue
            assert dict(ranks[receiver].incoming[number]) == sent
            boxes = [box for _, of_sender in messages for box in of_sender]
            assert sorted(boxes, key=str) == sorted(itertools.chain(*sent.values()), key=str)


def test_replicas_share_the_load_and_buckets_bound_what_a_rank_sends_and_receives():
    """Two replicas of two halves of 32 matrices go to an engine of two ranks and one of one."""
    num_tensors, rows, columns, width, max_bytes = 32, 8, 64, 4, 4096
    tensors = [SentTensor(f"t{n}", (rows, columns), "float32") for n in range(num_tensors)]
    half = rows // 2

    def halves(which: int) -> list[Region]:
        boxes = [Box(one.name, (which * half, 0), (half, columns)) for one in tensors]
        return [contiguous(box, "p") for box in boxes]

    sources = [halves(0), halves(1), halves(0), halves(1)]
    sinks = [halves(0), halves(1), halves(0) + halves(1)]
    units = [Unit(0, (one,)) for one in tensors]
    plan = plan_shards(units, groups(sources), groups(sinks), max_bytes=max_bytes)
    total = num_tensors * rows * columns * width
    assert plan.received == {0: total // 2, 1: total // 2, 2: total}
    assert plan.sent == {rank: 2 * total // 4 for rank in range(4)}
    assert plan.largest_bytes <= max_bytes
    assert len(plan.buckets) == total // max_bytes


def test_all_stages_send_in_every_bucket():
    tensors = [SentTensor(f"t{n}", (16,), "float32") for n in range(8)]
    units = [Unit(n // 4, (one,)) for n, one in enumerate(tensors)]
    sources = [[whole(one.name, one.shape) for one in tensors[4 * n : 4 * n + 4]] for n in (0, 1)]
    sinks = [[whole(one.name, one.shape) for one in tensors]]
    plan = plan_shards(units, groups(sources), groups(sinks), max_bytes=128)
    assert [{message.sender for message in bucket} for bucket in plan.buckets] == [{0, 1}] * 4


TENSOR = SentTensor("w", (4, 6), "bfloat16")


def held(rows: tuple[int, int]) -> Region:
    return contiguous(Box("w", (rows[0], 0), (rows[1], 6)), "p")


@pytest.mark.parametrize(
    ("sources", "sinks", "says"),
    [
        ([[held((0, 2))]], [[held((0, 4))]], r"w \(4, 6\): engine rank 0 needs \(2, 6\).*\(2, 0\)"),
        (
            [[held((0, 4))]],
            [[], [held((3, 4))]],
            r"w: engine rank 1 .*\(7, 6\).*trainer is \(4, 6\)",
        ),
        ([[], [held((2, 4))]], [[]], r"w: trainer rank 1 .*\(6, 6\)"),
        ([[]], [[whole("other", (1,))]], "engine rank 0 has other"),
        ([[whole("w", (4,))]], [[]], r"w: trainer rank 0 .*\(4,\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_tensor_rank_and_shapes(sources, sinks, says):
    with pytest.raises(WeightError, match=says):
        plan_shards([Unit(0, (TENSOR,))], groups(sources), groups(sinks), max_bytes=100)


@pytest.mark.parametrize("sources", [[[], []], [[held((2, 4))], []]])
def test_without_engines_no_error_names_one(sources):
    """An export and the hash of the weights plan an exchange among the trainer's ranks."""
    with pytest.raises(WeightError, match=r"^w.*(receiving|trainer) rank 0") as raised:
        whole_plan([Unit(0, (TENSOR,))], groups(sources), {"w": 0}, max_bytes=100)
    assert "engine" not in str(raised.value)


class CountedLoads(list[int]):
    """A list that counts how often an element is read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_the_choice_of_senders_takes_steps_in_proportion_to_the_ranks():
    """5,120 ranks that hold the same box for 5,120 others took hours, each pair a step."""
    num_reads = []
    for count in (50, 500):
        ranks = tuple(range(count))
        transfer = Transfer(Box("w", (0, 0), (4, 6)), 2, senders=ranks, receivers=ranks)
        balance = Balance(count, 10**9, {})
        balance.loads = CountedLoads(balance.loads)
        (bucket,) = balance.assign([Piece(0, ("w",), Part.of([(0, transfer)]))])
        assert bucket and len(set(balance.loads)) == 1, "all send alike"
        num_reads.append(balance.loads.num_reads)
    assert num_reads[1] <= 20 * num_reads[0]


def test_equal_engines_are_checked_once_and_a_wrong_one_is_named(monkeypatch):
    halves = groups([[held((0, 2))], [held((2, 2))]])
    visited = []

    class Counted(list):
        def __iter__(self):
            visited.append(len(self))
            return super().__iter__()

    monkeypatch.setattr(shard_plan, "disjoint", lambda boxes: Counted(disjoint(boxes)))
    equal = dict.fromkeys("abcde", halves)
    assert [url for url, _ in shard_plan._distinct(equal)] == ["a"]
    check_complete([Unit(0, (TENSOR,))], equal)
    assert visited == [2]
    with pytest.raises(WeightError, match=r"w: the ranks of engine d need 12 elements"):
        check_complete([Unit(0, (TENSOR,))], equal | {"d": halves[:1]})


def experts(num_layers: int) -> tuple[list[Unit], list[list[BoxGroup]], list[list[BoxGroup]]]:
    """Layers of 16 experts on 2 stages of 4 expert-parallel ranks, for engines that slice each."""
    num_stages, num_experts, columns, num_slices = 2, 16, 8, 8
    units, sources, sinks = [], [[] for _ in range(8)], [[] for _ in range(2 * num_slices)]
    for layer, expert in itertools.product(range(num_layers), range(num_experts)):
        stage = layer * num_stages // num_layers
        tensor = SentTensor(f"{layer}.{expert}", (num_slices, columns), "bfloat16")
        units.append(Unit(stage, (tensor,)))
        sources[4 * stage + expert % 4].append(whole(tensor.name, tensor.shape))
        for rank, regions in enumerate(sinks):
            row = Box(tensor.name, (rank % num_slices, 0), (1, columns))
            regions.append(contiguous(row, "p"))
    return units, groups(sources), groups(sinks)


def test_a_deeper_model_of_the_same_kinds_takes_no_more_steps(monkeypatch):
    """Else a model with 44,000 tensors for 64 engine ranks has millions of boxes to plan."""
    planned = []
    transfers = shard_plan._transfers

    def counted(tensor: SentTensor, *boxes: Any) -> Any:
        planned.append(tensor.name)
        return transfers(tensor, *boxes)

    monkeypatch.setattr(shard_plan, "_transfers", counted)
    steps = []
    for num_layers in (4, 32):
        units, sources, sinks = experts(num_layers)
        assert max(map(len, (*sources, *sinks))) == 1, "what a rank tells is as short"
        planned.clear()
        plan = plan_shards(units, sources, sinks, max_bytes=32 * num_layers * 16)
        messages = list(itertools.chain.from_iterable(plan.buckets))
        assert sum(len(list(one.boxes)) for one in messages) == len(sinks) * len(units)
        num_groups = sum(len(one.boxes.groups) for one in messages)
        steps.append((len(planned), len(plan.buckets), num_groups))
    assert steps[0] == steps[1]
    assert steps[1][0] == 8, "one of each expert-parallel rank of each stage"
