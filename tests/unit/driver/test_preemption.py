"""The stop file: its reason is reported, and its deadline decides what is saved."""

import asyncio
import errno
import os
import threading
import time
from types import SimpleNamespace

import pytest

from rlpost.driver.generation import StoppableGrader, StoppableTeacher
from rlpost.driver.preemption import (
    CLOCK_SLACK_S,
    EXIT_S,
    FIXED_S,
    SaveEstimate,
    StopRequest,
    leave_with,
)
from rlpost.errors import HalfTrained, Preempted
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample, Unfinished


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"reason": "signal USR2 to the batch script"}', "signal USR2 to the batch script"),
        ("by hand", "by hand"),
        ("", "no reason given"),
        ("[1]", r"\[1\]"),
    ],
)
def test_a_request_is_raised_with_its_reason(tmp_path, text, reason):
    stop = StopRequest(tmp_path / "STOP")
    stop.check()
    (tmp_path / "STOP").write_text(text)
    with pytest.raises(Preempted, match=f"^stop requested: {reason}$"):
        stop.check()


def stop_at(tmp_path, now, text):
    stop = StopRequest(tmp_path / "STOP", clock=lambda: now)
    (tmp_path / "STOP").write_text(text)
    return stop


def test_time_left_is_measured_to_the_deadline_and_time_passed_from_the_signal(
    tmp_path,
):
    stop = StopRequest(tmp_path / "STOP", clock=lambda: 130.0)
    assert (
        stop.time_left_s() is None
        and stop.seconds_from_signal() is None
        and not stop.is_nearly_over()
    )
    stop = stop_at(tmp_path, 130.0, '{"reason": "USR2", "time": 100, "deadline": "200"}')
    assert (stop.time_left_s(), stop.seconds_from_signal()) == (70.0, 30.0)
    assert not stop.is_nearly_over()
    assert stop_at(tmp_path, 199.0, '{"reason": "USR2", "deadline": 200}').is_nearly_over()


def test_a_manually_created_file_counts_from_its_creation(tmp_path):
    (tmp_path / "STOP").write_text("please")
    made = (tmp_path / "STOP").stat().st_mtime
    stop = StopRequest(tmp_path / "STOP", clock=lambda: made + 3)
    assert stop.seconds_from_signal() == pytest.approx(3)
    assert stop.time_left_s() is None


def test_a_checkpoint_is_saved_if_it_fits_before_the_deadline_otherwise_the_journal_is_used():
    assert leave_with(None, 1e9) == "checkpoint"
    assert leave_with(60 + EXIT_S, 60) == "checkpoint"
    assert leave_with(59 + EXIT_S, 60) == "journal"
    assert leave_with(-5, 0) == "journal"


@pytest.mark.parametrize(
    ("now", "request_", "saved"),
    [
        (100, Preempted("x"), "checkpoint"),
        (190, Preempted("x"), "journal"),
        (100, HalfTrained("x"), "journal"),
    ],
)
def test_what_is_saved_is_remembered_and_half_trained_weights_are_never_saved(
    tmp_path, now, request_, saved
):
    stop = stop_at(tmp_path, now, '{"reason": "x", "deadline": 200}')
    assert stop.left_with is None
    assert stop.leave_with(request_) == saved == stop.left_with


def test_before_any_measurement_a_save_is_estimated_from_its_size_on_slow_storage():
    saves = SaveEstimate()
    saves.expect(2e9, num_nodes=4)
    assert saves.estimate_s == pytest.approx(FIXED_S + 8 * 2e9 / (4 * 200e6))


def test_after_measurements_the_slowest_recent_rate_counts_with_a_margin():
    now = [0.0]
    saves = SaveEstimate(clock=lambda: now[0])
    saves.expect(1e15, num_nodes=1)
    saves.recall([{"step": 1}, {"bytes": 1000, "seconds": 10}, {"bytes": 1000, "seconds": None}])
    assert saves.estimate_s == pytest.approx(FIXED_S + 1.5 * 10)
    saves.begin()
    now[0] = 40.0
    assert saves.record_commit(2000) == 40.0
    assert saves.estimate_s == pytest.approx(FIXED_S + 1.5 * 40)
    assert saves.record_commit(2000) is None, "a commit that nobody began teaches nothing"
    for _ in range(5):
        saves.begin()
        now[0] += 1
        saves.record_commit(2000)
    assert saves.estimate_s == pytest.approx(FIXED_S + 1.5 * 1), "what was slow once is forgotten"


def test_a_transient_file_system_error_is_not_a_stop_request(tmp_path, monkeypatch):
    def stale(path, **named):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    stop = StopRequest(tmp_path / "STOP")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stale)
        assert not stop.requested()
        stop.check()
    (tmp_path / "STOP").write_text("now")
    assert stop.requested()


def test_a_request_that_is_unreadable_for_a_moment_counts_and_its_deadline_is_read_later(
    tmp_path, monkeypatch
):
    stop = stop_at(tmp_path, 130.0, '{"reason": "USR2", "time": 100, "deadline": 200}')
    (tmp_path / "STOP").rename(tmp_path / "away")
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "exists", lambda path: True)
        with pytest.raises(Preempted, match=r"^stop requested: its reason cannot be read: .*STOP"):
            stop.check()
    assert stop.requested() and stop.time_left_s() is None
    (tmp_path / "away").rename(tmp_path / "STOP")
    assert (stop.time_left_s(), stop.seconds_from_signal()) == (70.0, 30.0)


async def test_a_request_ends_a_wait_and_cancels_the_awaited_work(tmp_path):
    stop, ended = StopRequest(tmp_path / "STOP"), []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    assert await stop.unless_requested(asyncio.sleep(0, "result")) == "result"
    waiting = asyncio.create_task(stop.unless_requested(work()))
    await asyncio.sleep(0.01)
    (tmp_path / "STOP").write_text("now")
    with pytest.raises(Preempted):
        await waiting
    assert ended == [True]


NO_CONNECTION = SimpleNamespace(routes=None)


@pytest.mark.parametrize("singly", [False, True])
def test_a_slow_grading_is_interrupted_by_a_request_and_its_answers_are_kept(tmp_path, singly):
    """The group stays unfinished with all answers complete, so a resume only has to grade it.

    Answers that are graded singly keep their rewards.
    """
    stop, graded = StopRequest(tmp_path / "STOP"), []

    class Slow:
        async def grade(self, prompt, samples):
            if len(samples) == 1 and samples[0].index == 0:
                return [0.25]
            (tmp_path / "STOP").write_text("now")
            await asyncio.sleep(60)

        def grades_singly(self, prompt):
            return singly

    async def answer(builder, prompt, sampling):
        return Sample(prompt.prompt_id, builder.index, (1,), (2, 3), (-0.1, -0.2), "", "stop", 0)

    writer = GroupWriter(
        NO_CONNECTION, SamplingParams(8), n=2, grader=StoppableGrader(Slow(), stop), function=answer
    )
    entry = asyncio.run(writer.write(Unfinished(Prompt(7, "p", (1,), "label"))))
    assert isinstance(entry, Unfinished)
    assert [sample.finish_reason for sample in entry.samples] == ["stop", "stop"]
    assert [sample.reward for sample in entry.samples] == [0.25 if singly else None, None]

    class Quick:
        async def grade(self, prompt, samples):
            graded.extend(sample.index for sample in samples)
            return [1.0 for _ in samples]

        def grades_singly(self, prompt):
            return singly

    later = StoppableGrader(Quick(), StopRequest(tmp_path / "none"))
    group = asyncio.run(
        GroupWriter(NO_CONNECTION, SamplingParams(8), n=2, grader=later, function=answer).write(
            entry
        )
    )
    assert (group.rewards, graded) == (((0.25, 1.0), [1]) if singly else ((1.0, 1.0), [0, 1]))
    assert all(scored.sample.reward is None for scored in group.samples)


def test_a_slow_teacher_is_interrupted_by_a_request_and_its_answers_are_kept(tmp_path):
    stop = StopRequest(tmp_path / "STOP")

    class Slow:
        async def scored(self, graded):
            (tmp_path / "STOP").write_text("now")
            await asyncio.sleep(60)

    class Quick:
        async def grade(self, prompt, samples):
            return [1.0 for _ in samples]

        def grades_singly(self, prompt):
            return False

    async def answer(builder, prompt, sampling):
        return Sample(prompt.prompt_id, builder.index, (1,), (2, 3), (-0.1, -0.2), "", "stop", 0)

    writer = GroupWriter(
        NO_CONNECTION,
        SamplingParams(8),
        n=2,
        grader=Quick(),
        function=answer,
        finish=StoppableTeacher(Slow(), stop),
    )
    entry = asyncio.run(writer.write(Unfinished(Prompt(7, "p", (1,), "label"))))
    assert isinstance(entry, Unfinished)
    assert [sample.finish_reason for sample in entry.samples] == ["stop", "stop"]


class Clock:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_clock_that_differs_from_the_writers_does_not_move_the_deadline(tmp_path, ahead_s):
    """The run is killed 100 s after the signal, independently of this host's clock."""
    wall, steady = Clock(1000.0 + ahead_s), Clock(50.0)
    stop = StopRequest(tmp_path / "STOP", clock=wall, monotonic=steady)
    assert not stop.requested()
    for clock in (wall, steady):
        clock.now += 1
    (tmp_path / "STOP").write_text('{"reason": "USR2", "time": 1001, "deadline": 1101}')
    assert stop.requested()
    for clock in (wall, steady):
        clock.now += 30
    assert stop.time_left_s() == pytest.approx(70, abs=CLOCK_SLACK_S + 1)
    assert stop.seconds_from_signal() == pytest.approx(30, abs=CLOCK_SLACK_S + 1)


def test_a_request_that_is_noticed_late_counts_from_when_it_was_written(tmp_path):
    """The process was busy, so only the writer's time tells how much time has passed."""
    wall, steady = Clock(1000.0), Clock(50.0)
    stop = StopRequest(tmp_path / "STOP", clock=wall, monotonic=steady)
    assert not stop.requested()
    (tmp_path / "STOP").write_text('{"reason": "USR2", "time": 1005, "deadline": 1105}')
    for clock in (wall, steady):
        clock.now += 60
    assert stop.time_left_s() == pytest.approx(45) and stop.seconds_from_signal() == pytest.approx(
        55
    )


def test_a_hanging_folder_does_not_block_polling(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr("rlpost.driver.preemption.ANSWER_S", 0.3)
    stop, exists = StopRequest(tmp_path / "STOP"), os.path.exists
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "exists", lambda path: answers.wait(20) and exists(path))
        started = time.monotonic()
        for _ in range(50):
            assert not stop.requested()
        assert time.monotonic() - started < 10, "not 0.3 s at each of 50 calls"
        (tmp_path / "STOP").write_text("now")
        answers.set()
        deadline = time.monotonic() + 20
        while not stop.requested() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stop.requested()


def test_a_file_written_by_another_node_is_found_despite_a_negative_cache_entry(
    tmp_path, monkeypatch
):
    """NFS clients cache the absence of a file until its folder is opened."""
    cached, stat, opened = {}, os.stat, os.open

    def from_cache(path, **named):
        if str(path) in cached:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        try:
            return stat(path, **named)
        except FileNotFoundError:
            cached[str(path)] = True
            raise

    def asks_the_server(path, flags, *given, **named):
        if flags & os.O_DIRECTORY:
            cached.clear()
        return opened(path, flags, *given, **named)

    monkeypatch.setattr(os, "stat", from_cache)
    monkeypatch.setattr(os, "open", asks_the_server)
    stop = StopRequest(tmp_path / "STOP")
    assert not stop.requested()
    (tmp_path / "STOP").write_text("now")
    assert stop.requested()


def test_a_request_that_is_still_being_written_is_read_again(tmp_path):
    (tmp_path / "STOP").write_text("")
    stop = StopRequest(tmp_path / "STOP", clock=lambda: 130.0)
    with pytest.raises(Preempted, match="no reason given"):
        stop.check()
    (tmp_path / "STOP").write_text('{"reason": "USR2", "time": 100, "deadline": 200}')
    assert stop.time_left_s() == pytest.approx(70)
    with pytest.raises(Preempted, match="USR2"):
        stop.check()
