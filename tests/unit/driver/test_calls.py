"""The wrappers of a call, one by one and nested; ranks are threads where the protocol matters."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rlpost.driver.calls import Call, Calls, LeaveOnStop, repeat
from rlpost.driver.preemption import EXIT_S, StopRequest
from rlpost.driver.worker_groups import ActorGroup
from rlpost.errors import Fenced, HalfTrained, Preempted, RlpostError
from rlpost.trainer.stop_points import StopPoint, StopPoints


class Ranks:
    """Ranks that compute in separate threads; a micro-batch takes ``delays_s`` of its rank."""

    def __init__(self, delays_s, stop_file, stop_after=None):
        self.stop_points = [StopPoints(deadline_s=20) for _ in delays_s]
        self.done = [0 for _ in delays_s]
        self.delays_s, self.stop_file, self.stop_after = delays_s, stop_file, stop_after
        self.pool = ThreadPoolExecutor()
        self.held = []

    async def compute(self, length):
        loop = asyncio.get_running_loop()
        work = [
            loop.run_in_executor(self.pool, self._pass, rank, length)
            for rank in range(len(self.delays_s))
        ]
        return list(await asyncio.gather(*work))

    async def call_aside(self, method, *arguments):
        act = {"stop_points.hold": self.hold, "stop_points.release": self.release}[method]
        return await act(*arguments)

    async def hold(self):
        found = [one.hold() for one in self.stop_points]
        self.held.append(found)
        return found

    async def release(self, stop_at):
        for one in self.stop_points:
            one.release(stop_at)

    def _pass(self, rank, length):
        with self.stop_points[rank].passing(length):
            for index in range(length):
                self.stop_points[rank].cross(index)
                if rank == 0 and self.stop_after == self.done[rank]:
                    self.stop_file.write_text("test")
                time.sleep(self.delays_s[rank])
                self.done[rank] += 1
        return rank


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    for module in ("calls", "preemption"):
        monkeypatch.setattr(f"rlpost.driver.{module}.POLL_S", 0.01)


@pytest.fixture
def stop(tmp_path):
    return StopRequest(tmp_path / "STOP")


def make(ranks, stop, length, *, may_leave=True):
    call, send = Call("train_step", may_leave), partial(ranks.compute, length)
    return asyncio.run(LeaveOnStop(ActorGroup(ranks), stop).over(call, send))


def test_without_a_stop_request_no_rank_gets_a_message(tmp_path, stop):
    ranks = Ranks([0.001, 0.001], tmp_path / "STOP")
    assert make(ranks, stop, 5) == [0, 1]
    assert ranks.held == []


def test_ranks_of_different_speed_stop_a_pass_at_the_same_micro_batch(tmp_path, stop):
    ranks = Ranks([0.05, 0.02, 0.04], tmp_path / "STOP", stop_after=2)
    with pytest.raises(Preempted, match="between two micro-batches"):
        make(ranks, stop, 1000)
    # the driver does not wait for the last ranks: their next call is queued behind this one
    ranks.pool.shutdown()
    assert 2 < ranks.done[0] == ranks.done[1] == ranks.done[2] < 1000
    assert len(ranks.held) == 1


def test_a_nearly_finished_pass_completes_and_the_next_may_follow(tmp_path, stop):
    ranks = Ranks([0.1, 0.001], tmp_path / "STOP", stop_after=1)
    assert make(ranks, stop, 2) == [0, 1]
    assert ranks.done == [2, 2]
    assert make(ranks, stop, 1, may_leave=False) == [0, 1], "nobody stops at a place of long ago"


def test_an_uninterruptible_call_completes_or_leaves_an_unknown_state(tmp_path, stop):
    ranks = Ranks([0.02, 0.02], tmp_path / "STOP", stop_after=1)
    assert make(ranks, stop, 10, may_leave=False) == [0, 1]
    assert ranks.held == []
    (tmp_path / "STOP").write_text('{"reason": "late", "deadline": 1}')
    with pytest.raises(HalfTrained):
        make(ranks, StopRequest(tmp_path / "STOP"), 20, may_leave=False)
    ranks.pool.shutdown()


@pytest.mark.parametrize("is_near", [True, False])
async def test_a_stop_with_a_hanging_rank_ends_in_time_to_rely_on_the_journal(
    tmp_path, monkeypatch, is_near
):
    """The ranks' state is unknown then; a failure would save nothing and count as a failure."""

    class Hung:
        async def compute(self):
            end = time.time() + EXIT_S + 0.5 if is_near else None
            (tmp_path / "STOP").write_text(json.dumps({"reason": "late", "deadline": end}))
            await asyncio.Event().wait()

        async def call_aside(self, method):
            assert method == "stop_points.hold"
            await asyncio.Event().wait()

    if not is_near:
        monkeypatch.setattr("rlpost.driver.calls.HOLD_DEADLINE_S", 0.2)
    with pytest.raises(HalfTrained, match="which rank hangs"):
        async with asyncio.timeout(20):
            hung = Hung()
            calls = Calls(ActorGroup(hung), StopRequest(tmp_path / "STOP"))
            await calls.make("train_step", hung.compute, may_leave=True)


def test_a_stop_request_before_the_call_prevents_it(tmp_path, stop):
    (tmp_path / "STOP").write_text("early")
    ranks = Ranks([0.0], tmp_path / "STOP")
    with pytest.raises(Preempted, match="early"):
        make(ranks, stop, 1)
    assert ranks.done == [0]


def test_an_operation_is_repeated_as_often_as_ranks_are_recovered():
    errors = [RlpostError("died"), RlpostError("died again")]

    async def operation():
        if errors:
            raise errors.pop(0)
        return 7

    async def recover(error):
        recovered.append(str(error))
        return len(recovered) <= most

    recovered, most = [], 2
    assert asyncio.run(repeat(operation, recover=recover)) == 7
    assert recovered == ["died", "died again"]

    recovered, most, errors = [], 1, [RlpostError("died"), RlpostError("cannot be recovered")]
    with pytest.raises(RlpostError, match="cannot be recovered"):
        asyncio.run(repeat(operation, recover=recover))
    for error in (Preempted("leave"), HalfTrained("late"), Fenced("another owner")):
        recovered, most, errors = [], 9, [error]
        with pytest.raises(type(error)):
            asyncio.run(repeat(operation, recover=recover))
        assert not recovered, "ranks that left a call, or a folder, have not died"


class Hanging:
    """The wrapper of hangs, which reports one at once."""

    async def over(self, call, send):
        log.append(f"watch {call.name}")
        try:
            return await send()
        except BaseException as error:
            log.append(f"watch ends with {type(error).__name__}")
            raise


log = []


def test_the_wrappers_nest_in_the_documented_order(tmp_path, stop):
    """A stop ends a watched call: the watch sees Interrupted, the caller Preempted."""
    log.clear()
    ranks = Ranks([0.01, 0.01], tmp_path / "STOP", stop_after=2)
    calls = Calls(ActorGroup(ranks), stop, Hanging())
    with pytest.raises(Preempted):
        asyncio.run(calls.make("train_step", partial(ranks.compute, 1000), may_leave=True))
    ranks.pool.shutdown()
    assert log == ["watch train_step", "watch ends with Interrupted"]


def test_a_call_that_ends_while_ranks_are_held_is_released_after_the_stop_point(tmp_path, stop):
    """In the other order the stop point would end the next call."""

    released = []

    class Slow(Ranks):
        async def hold(self):
            await asyncio.sleep(0.2)  # the call ends in the meantime
            return await super().hold()

        async def release(self, stop_at):
            released.append(stop_at)
            await super().release(stop_at)

    ranks = Slow([0.02], tmp_path / "STOP", stop_after=0)
    assert make(ranks, stop, 4) == [0]
    assert released == [StopPoint(1, 0), None]
