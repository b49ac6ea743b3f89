"""Which rank gets a tensor or file, over generated sizes, ranks and holders."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlpost.config.plan.whole_tensors import Item, assign


@st.composite
def stages(draw: st.DrawFn) -> list[Item]:
    """Items of several stages, whose ranks differ, in random order."""
    items: list[Item] = []
    first = 0
    for count in draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)):
        ranks = tuple(range(first, first + count))
        holders = st.lists(st.sampled_from(ranks), unique=True).map(tuple)
        sizes = st.lists(st.tuples(st.integers(0, 100), holders), max_size=40)
        items += [Item(size, ranks, some) for size, some in draw(sizes)]
        first += count
    return draw(st.permutations(items))


@given(stages())
def test_no_rank_exceeds_the_mean_of_its_stage_by_more_than_an_item(items):
    assigned = assign(items)
    assert assigned == assign(items)
    for ranks in {item.ranks for item in items}:
        loads: Counter[int] = Counter()
        of_stage = [
            (item, rank) for item, rank in zip(items, assigned, strict=True) if item.ranks == ranks
        ]
        for item, rank in of_stage:
            assert rank in ranks
            loads[rank] += item.num_bytes
        sizes = [item.num_bytes for item, _ in of_stage]
        assert max(loads.values()) <= sum(sizes) / len(ranks) + max(sizes)


def test_experts_stay_where_they_are_and_small_tensors_fill_the_gaps():
    """160 experts of 8 ranks, of 3 MB each, beside shared tensors of other sizes."""
    ranks = tuple(range(8))
    experts = [Item(3_000_000, ranks, (number // 20,)) for number in range(160)]
    shared = [Item(size, ranks, ranks) for size in (9_000_000, 5_000_000, *[10_000] * 40)]
    assigned = assign([*shared, *experts])
    loads: Counter[int] = Counter()
    for item, rank in zip([*shared, *experts], assigned, strict=True):
        loads[rank] += item.num_bytes
    assert max(loads.values()) / (loads.total() / len(ranks)) <= 1.05
    moved = [rank for number, rank in enumerate(assigned[len(shared) :]) if rank != number // 20]
    assert len(moved) <= 5, "those that the two large tensors beside them displace"


def test_what_any_rank_may_get_fills_the_gaps_of_the_stages():
    files = [Item(5, (0, 1)), Item(5, (0, 1)), Item(5, (0, 1)), Item(5, (2, 3))]
    assert Counter(assign([Item(5, (0, 1, 2, 3)), *files])) == {0: 2, 1: 1, 2: 1, 3: 1}
