"""Calls that hang, on fake ranks: which are ended, and which files and records are written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlpost.driver.calls import Call, EndWhenHanging
from rlpost.driver.hang_report import HANG_FILE, HangReport
from rlpost.driver.worker_groups import ActorGroup
from rlpost.errors import Hang, RlpostError
from rlpost.observe.progress.overdue import ENOUGH, OverdueRule
from rlpost.observe.progress.position import Frame, GroupCount, Position

REDUCE = Frame("/lib/torch/distributed/distributed_c10d.py", 3120, "all_reduce")
READ = Frame("/code/custom/loss.py", 12, "read_table")
RULE = OverdueRule(factor=2.0, min_s=0.04)


def position(rank: int, entered: int, micro_batch: int = 0) -> Position:
    frame = READ if entered == 41 else REDUCE
    group = GroupCount("0", "default_pg", (0, 1, 2), entered)
    return Position("train_step", 9, micro_batch, 4, (frame,), (group,))


class FakeRanks:
    """Three ranks; ``pictures`` are their positions at each examination, the last one repeated."""

    names = ("actor-0 on 10.0.0.1", "actor-1 on 10.0.0.1", "actor-2 on 10.0.0.2")

    def __init__(self, *pictures: Sequence[Position | None], record: str | None = None) -> None:
        self._pictures: Iterator[Sequence[Position | None]] = iter(pictures)
        self._newest: Sequence[Position | None] = ()
        self._record = record
        self.examinations = 0

    async def answers_aside(self, method: str, *arguments: str, within_s: float) -> list[Any]:
        if method == "write_flight_record":
            return [self._record, None, None]
        assert method == "position"
        self.examinations += 1
        self._newest = next(self._pictures, self._newest)
        return list(self._newest)


STUCK = [position(0, 42), position(1, 42), position(2, 41)]


CALL = Call("train_step", may_leave=False)


def watch(folder: Path, ranks: FakeRanks, *, is_stopping: bool = False) -> EndWhenHanging:
    report = HangReport(folder, hosts={"10.0.0.1": "n01", "10.0.0.2": "n02"})
    workers: Any = ranks
    return EndWhenHanging(ActorGroup(workers), RULE, report, is_stopping=lambda: is_stopping)


async def returned(value: Any = 7, after_s: float = 0.0) -> Any:
    await asyncio.sleep(after_s)
    return value


async def with_history(watching: EndWhenHanging, call: Call = CALL) -> None:
    for _ in range(ENOUGH):
        assert await watching.over(call, returned) == 7


async def hung(watching: EndWhenHanging) -> Hang:
    await with_history(watching)
    async with asyncio.timeout(10):
        with pytest.raises(Hang) as found:
            await watching.over(CALL, partial(returned, after_s=60.0))
    return found.value


def test_a_call_in_which_no_rank_moves_ends_with_the_name_of_the_rank(tmp_path: Path) -> None:
    hang = asyncio.run(hung(watch(tmp_path, FakeRanks(STUCK))))
    assert "train_step hangs because of actor-2 on n02" in str(hang)
    assert "41 of 42 collectives of default_pg (ranks 0, 1, 2)" in str(hang)
    assert "custom/loss.py:12 read_table" in str(hang)
    assert "--hang-factor 2" in str(hang) and str(tmp_path / HANG_FILE) in str(hang)


def test_the_ledger_gets_ranks_hosts_and_reason(tmp_path: Path) -> None:
    details = asyncio.run(hung(watch(tmp_path, FakeRanks(STUCK)))).details
    assert details["call"] == "train_step"
    assert (details["ranks"], details["hosts"]) == ([2], ["n02"])
    assert "41 of 42" in details["why"]
    assert details["seconds"] >= 0.0


def test_the_stacks_and_counts_of_all_ranks_are_in_a_file(tmp_path: Path) -> None:
    asyncio.run(hung(watch(tmp_path, FakeRanks(STUCK))))
    text = (tmp_path / HANG_FILE).read_text()
    assert text.startswith("train_step hangs because of actor-2 on n02: ")
    for name in ("actor-0 on n01", "actor-1 on n01", "actor-2 on n02"):
        assert f"\n{name}: train_step, micro-batch 1 of 4" in text
    assert text.count(str(REDUCE)) >= 2 and str(READ) in text
    assert "  41 collectives of default_pg" in text


def test_the_log_shows_every_rank_and_torchs_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(hung(watch(tmp_path, FakeRanks(STUCK, record="/a/flight-0.json"))))
    for name in ("actor-0 on n01", "actor-1 on n01", "actor-2 on n02", "/a/flight-0.json"):
        assert name in caplog.text


def test_a_folder_that_cannot_be_written_does_not_hide_the_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hang = asyncio.run(hung(watch(tmp_path / "missing", FakeRanks(STUCK))))
    assert "actor-2 on n02" in str(hang)
    assert "stacks were not written" in caplog.text


def test_ranks_at_the_same_place_hang_without_a_name(tmp_path: Path) -> None:
    hang = asyncio.run(hung(watch(tmp_path, FakeRanks([position(0, 42)] * 3))))
    assert "train_step hangs: all ranks are at the same place" in str(hang)
    assert hang.details["ranks"] == [] and hang.details["hosts"] == []


async def test_a_slow_call_whose_ranks_move_is_not_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moving = [[position(0, 42 + number)] * 3 for number in range(100)]
    ranks = FakeRanks(*moving)
    watching = watch(tmp_path, ranks)
    await with_history(watching)
    assert await watching.over(CALL, partial(returned, 8, after_s=0.15)) == 8
    assert ranks.examinations >= 2
    assert "but ranks move" in caplog.text
    assert not (tmp_path / HANG_FILE).exists()


@pytest.mark.parametrize("case", ["no history", "stopping"])
async def test_some_calls_are_not_watched(tmp_path: Path, case: str) -> None:
    ranks = FakeRanks(STUCK)
    watching = watch(tmp_path, ranks, is_stopping=case == "stopping")
    if case != "no history":
        await with_history(watching)
    assert await watching.over(CALL, partial(returned, 8, after_s=0.15)) == 8
    assert ranks.examinations == 0


async def test_ranks_that_were_suspended_with_the_driver_are_not_reported(tmp_path: Path) -> None:
    """scontrol suspend stops driver and ranks while the clock advances."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            self.now += 100.0  # each reading advances the clock as a suspension does
            return self.now

    ranks: Any = FakeRanks(STUCK)
    report = HangReport(tmp_path, hosts={})
    watching = EndWhenHanging(
        ActorGroup(ranks), RULE, report, is_stopping=lambda: False, clock=Clock()
    )
    await with_history(watching)
    async with asyncio.timeout(10):
        assert await watching.over(CALL, partial(returned, 8, after_s=0.1)) == 8
    assert ranks.examinations >= 2
    assert not (tmp_path / HANG_FILE).exists()


async def test_each_kind_of_call_has_its_own_history(tmp_path: Path) -> None:
    ranks = FakeRanks(STUCK)
    watching = watch(tmp_path, ranks)
    await with_history(watching, Call("compute_logprobs", may_leave=True))
    assert await watching.over(CALL, partial(returned, 8, after_s=0.15)) == 8
    assert ranks.examinations == 0


async def test_a_failed_call_keeps_its_error_and_is_not_added_to_the_history(
    tmp_path: Path,
) -> None:
    async def failing() -> None:
        raise RlpostError("actor-1 died")

    ranks = FakeRanks(STUCK)
    watching = watch(tmp_path, ranks)
    for _ in range(ENOUGH):
        with pytest.raises(RlpostError, match="actor-1 died"):
            await watching.over(CALL, failing)
    assert await watching.over(CALL, partial(returned, 8, after_s=0.15)) == 8
    assert ranks.examinations == 0


async def test_a_cancelled_watch_cancels_the_call(tmp_path: Path) -> None:
    ranks = FakeRanks(STUCK)
    watching = watch(tmp_path, ranks)
    await with_history(watching)
    work = asyncio.ensure_future(returned(after_s=60.0))
    over = asyncio.ensure_future(watching.over(CALL, lambda: work))
    await asyncio.sleep(0.01)
    over.cancel()
    with pytest.raises(asyncio.CancelledError):
        await over
    await asyncio.sleep(0)
    assert work.cancelled()
