"""Which rank the others wait for, from the positions of all ranks."""

from __future__ import annotations

from itertools import permutations

import pytest

from rlpost.observe.progress.odd_rank import collective, compare, describe, site
from rlpost.observe.progress.position import Frame, GroupCount, Position

STEP = Frame("/code/rlpost/trainer/step.py", 150, "run")
REDUCE = Frame("/lib/torch/distributed/distributed_c10d.py", 3120, "all_reduce")
WRAPPER = Frame("/lib/torch/distributed/c10d_logger.py", 83, "wrapper")
BARRIER = Frame("/lib/torch/distributed/distributed_c10d.py", 5200, "barrier")
READ = Frame("/code/custom/loss.py", 12, "read_table")
P2P = Frame("/lib/megatron/core/pipeline_parallel/p2p_communication.py", 300, "recv_forward")


def group(key: str, ranks: tuple[int, ...], entered: int) -> GroupCount:
    return GroupCount(key, key, ranks, entered)


def at(*stack: Frame, groups: tuple[GroupCount, ...] = (), **changes: object) -> Position:
    values = {"call": "train_step", "number": 7, "micro_batch": 2, "num_micro_batches": 8}
    return Position(**(values | {"stack": stack, "groups": groups} | changes))  # type: ignore[arg-type]


def world(entered: int, *stack: Frame, size: int = 4) -> Position:
    return at(*stack, groups=(group("default_pg", tuple(range(size)), entered),))


IDLE = at(call=None, micro_batch=None, num_micro_batches=0)


@pytest.mark.parametrize("odd", range(4))
def test_a_rank_that_has_not_entered_a_collective_is_to_blame(odd: int) -> None:
    positions = [world(42, STEP, WRAPPER, REDUCE)] * 4
    positions[odd] = world(41, STEP, READ)
    found = compare(positions)
    assert found.ranks == (odd,)
    assert "41 of 42 collectives of default_pg (ranks 0, 1, 2, 3)" in found.why


@pytest.mark.parametrize("odd", range(4))
def test_a_rank_that_skipped_a_collective_and_returned_is_to_blame(odd: int) -> None:
    positions = [world(42, STEP, REDUCE)] * 4
    positions[odd] = at(call=None, groups=(group("default_pg", (0, 1, 2, 3), 41),))
    assert compare(positions).ranks == (odd,)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_victim_that_others_wait_for_is_not_to_blame(order: tuple[int, ...]) -> None:
    """Rank d waits for c in their tensor-parallel group, and b for d in a data-parallel one."""
    a, b, c, d = order
    tp_ab, tp_cd = tuple(sorted((a, b))), tuple(sorted((c, d)))
    dp_bd, dp_ac = tuple(sorted((b, d))), tuple(sorted((a, c)))
    by_rank = {
        a: at(STEP, REDUCE, groups=(group("tp0", tp_ab, 9), group("dp0", dp_ac, 3))),
        b: at(STEP, REDUCE, groups=(group("tp0", tp_ab, 9), group("dp1", dp_bd, 3))),
        c: at(STEP, READ, groups=(group("tp1", tp_cd, 8), group("dp0", dp_ac, 2))),
        d: at(STEP, REDUCE, groups=(group("tp1", tp_cd, 9), group("dp1", dp_bd, 2))),
    }
    assert compare([by_rank[rank] for rank in range(4)]).ranks == (c,)


def test_ranks_equally_far_behind_are_both_to_blame() -> None:
    positions = [world(42, REDUCE), world(41, READ), world(42, REDUCE), world(41, READ)]
    assert compare(positions).ranks == (1, 3)


def test_of_ranks_behind_the_farthest_is_to_blame() -> None:
    positions = [world(42, REDUCE), world(41, READ), world(42, REDUCE), world(40, READ)]
    found = compare(positions)
    assert found.ranks == (3,)
    assert "40 of 42" in found.why


def test_ranks_that_wait_for_each_other_without_a_majority_are_all_named() -> None:
    tp = ((2, 3), "tp1")
    everybody = (0, 1, 2, 3)
    positions = [
        at(STEP, REDUCE, groups=(group("world", everybody, 5),)),
        at(STEP, BARRIER, micro_batch=1, groups=(group("world", everybody, 5),)),
        at(REDUCE, groups=(group("world", everybody, 4), group(tp[1], tp[0], 9))),
        at(REDUCE, groups=(group("world", everybody, 5), group(tp[1], tp[0], 8))),
    ]
    found = compare(positions)
    assert found.ranks == (2, 3)
    assert "wait for each other" in found.why


@pytest.mark.parametrize("odd", range(4))
def test_of_ranks_that_wait_for_each_other_the_one_where_most_are_skipped_a_collective(
    odd: int,
) -> None:
    """It skips the last one of its pair and waits with the other pair, its peer waits for it."""
    peer, later = odd ^ 1, Frame("/code/rlpost/trainer/passes.py", 20, "global_metrics")
    pair = tuple(sorted((odd, peer)))
    pairs = {rank: group(f"tp{rank // 2}", (rank & 2, rank & 2 | 1), 9) for rank in range(4)}
    everybody = (0, 1, 2, 3)
    positions = [
        at(later, REDUCE, groups=(group("world", everybody, 5), pairs[rank])) for rank in range(4)
    ]
    positions[odd] = at(
        later, REDUCE, groups=(group("world", everybody, 5), group(f"tp{odd // 2}", pair, 8))
    )
    positions[peer] = at(STEP, REDUCE, groups=(group("world", everybody, 4), pairs[peer]))
    found = compare(positions)
    assert found.ranks == (odd,)
    assert f"8 of 9 collectives of tp{odd // 2}" in found.why and "skipped" in found.why


def test_a_rank_that_does_not_answer_is_to_blame_before_any_other() -> None:
    found = compare([world(42, REDUCE), None, world(41, READ)])
    assert found.ranks == (1,)
    assert "does not answer" in found.why


def test_nothing_is_known_when_no_rank_answers() -> None:
    assert compare([None, None]).ranks == ()


@pytest.mark.parametrize("odd", range(3))
def test_with_equal_counts_the_rank_outside_of_collectives_is_to_blame(odd: int) -> None:
    positions = [at(STEP, P2P)] * 3
    positions[odd] = at(STEP, READ)
    assert compare(positions).ranks == (odd,)


def test_with_equal_counts_a_rank_that_returned_is_to_blame_when_others_wait() -> None:
    assert compare([at(STEP, REDUCE), IDLE, at(STEP, REDUCE)]).ranks == (1,)


def test_without_collectives_the_rank_that_has_not_returned_is_to_blame() -> None:
    assert compare([IDLE, IDLE, at(STEP, READ)]).ranks == (2,)


def test_the_one_in_another_collective_than_most_is_to_blame() -> None:
    here = Frame("/code/rlpost/trainer/passes.py", 20, "global_metrics")
    positions = [at(STEP, REDUCE), at(here, BARRIER), at(STEP, REDUCE)]
    assert compare(positions).ranks == (1,)


def test_the_one_at_another_micro_batch_than_most_is_to_blame() -> None:
    positions = [at(STEP, REDUCE), at(STEP, REDUCE), at(STEP, REDUCE, micro_batch=1)]
    assert compare(positions).ranks == (2,)


@pytest.mark.parametrize(
    "positions",
    [
        [at(STEP, REDUCE), at(STEP, BARRIER, micro_batch=3)],
        [at(STEP, REDUCE)] * 2 + [at(STEP, REDUCE, micro_batch=3)] * 2,
        [at(STEP, REDUCE)] * 3,
        [IDLE, IDLE],
    ],
    ids=["two", "two against two", "equal", "idle"],
)
def test_no_rank_is_to_blame_without_a_majority(positions: list[Position]) -> None:
    assert compare(positions).ranks == ()


def test_a_group_with_one_member_here_blames_nobody() -> None:
    engine = group("engines of stage 0", (0, 1, 2), 9)
    positions = [at(STEP, REDUCE, groups=(engine,)), at(STEP, REDUCE)]
    assert compare(positions).ranks == ()


def test_a_collective_is_named_by_the_function_that_was_called() -> None:
    gather = Frame(REDUCE.file, 3000, "all_gather_object")
    inner = Frame(REDUCE.file, 4000, "all_gather")
    assert collective(at(STEP, WRAPPER, gather, WRAPPER, inner)) == "all_gather_object"
    assert collective(at(STEP, P2P)) == "recv_forward"
    assert collective(at(STEP, READ)) is None


def test_the_place_of_a_rank_is_the_innermost_line_outside_of_libraries() -> None:
    assert site(at(STEP, WRAPPER, REDUCE)) == STEP
    assert site(at(REDUCE)) == REDUCE
    assert site(IDLE) is None


def test_a_description_has_call_micro_batch_collective_and_place() -> None:
    assert describe(at(STEP, WRAPPER, REDUCE)) == (
        "train_step, micro-batch 3 of 8, in all_reduce, at /code/rlpost/trainer/step.py:150 run"
    )
    assert describe(IDLE) == "between calls, 7 calls done"
    assert describe(None) == "no answer"
