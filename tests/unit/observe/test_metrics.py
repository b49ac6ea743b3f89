"""Metrics on disk: every step once, also after a crash; progress lines; the summary."""

import asyncio
import errno
import json
import os
import stat
import threading
import time
from functools import partial

import psutil
import pytest

from rlpost.errors import Fenced
from rlpost.observe.driver_lines import duration, nothing_to_learn, progress_line
from rlpost.observe.writer import MetricsWriter, eval_rewards, read_metrics
from tests.unit.paused_thread import PausedThread

LINE = {
    "reward/mean": 0.5,
    "rollout/response_length_mean": 3.0,
    "train/loss": -0.01,
    "train/grad_norm": 1.25,
    "time/tokens_per_s": 1234.5,
    "time/step_s": 0.75,
    "eval/heldout/reward_mean": 0.875,
}


def test_rewinding_forgets_later_steps_and_a_torn_last_line(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(4):
        writer.write(step, {"x": step / 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    writer.rewind(2)
    writer.write(3, {"x": 9.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": s, "x": x} for s, x in enumerate((0.0, 0.5, 1.0, 9.0))
    ]


def test_metrics_of_an_earlier_step_are_added_to_its_line(tmp_path):
    """Those of an evaluation beside training follow when later lines are written."""
    path, mirrored = tmp_path / "metrics.jsonl", []
    writer = MetricsWriter(path, also=lambda *line: mirrored.append(line))

    async def amend(step, metrics):
        return await writer.amend(step, metrics)

    assert not asyncio.run(amend(1, {"eval": 1.0})), "its line may still be written"
    for step in (1, 2, 3):
        writer.write(step, {"x": float(step)})
    assert asyncio.run(amend(2, {"eval": 2.0})) and asyncio.run(amend(0, {"eval": 0.5}))
    writer.write(4, {"x": 4.0})
    assert read_metrics(path) == [
        {"step": 0, "eval": 0.5},
        {"step": 1, "x": 1.0},
        {"step": 2, "x": 2.0, "eval": 2.0},
        {"step": 3, "x": 3.0},
        {"step": 4, "x": 4.0},
    ]
    assert mirrored[3:5] == [(2, {"eval": 2.0}), (0, {"eval": 0.5})]
    first = MetricsWriter(tmp_path / "new.jsonl")
    assert asyncio.run(first.amend(0, {"eval": 0.5}))
    assert read_metrics(tmp_path / "new.jsonl") == [{"step": 0, "eval": 0.5}]


def test_rewinding_before_anything_was_written_is_fine(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl").rewind(0)
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_rewound_file_stays_rewound_when_the_machine_goes_down(tmp_path, monkeypatch):
    """Its content is on disk before it takes the name, and the folder that holds the name
    afterwards.
    """
    done = []

    def fsync(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", fsync)
    rename = os.rename
    monkeypatch.setattr(
        os, "rename", lambda path, target: done.append("renamed") or rename(path, target)
    )
    MetricsWriter(tmp_path / "metrics.jsonl").rewind(0)
    assert done == ["file", "renamed", "folder"]


DAMAGE = {
    "a flipped bit in a brace": b'["step": 2, "x": 0.5}',
    "a flipped bit in a key": b'{"stdp": 2, "x": 0.5}',
    "a flipped bit in a step": b'{"step": 6, "x": 0.5}',
    "a step that is text": b'{"step":"2", "x": 0.5}',
    "no UTF-8": b'{"step": 2, "\xf0": 0.5}',
    "noise": b"\x00\xff\xfe",
    "null": b"null",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_line_is_left_out_and_named_and_no_other(tmp_path, name, caplog):
    lines = [b'{"step": %d, "x": 0.5}' % step for step in range(1, 7)]
    lines[1] = DAMAGE[name]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert [each["step"] for each in read_metrics(path)] == [1, 3, 4, 5, 6]
    MetricsWriter(path).rewind(5)
    assert "metrics.jsonl: line 2" in caplog.text and caplog.text.count("is left out") == 1
    assert [each["step"] for each in read_metrics(path)] == [1, 3, 4, 5]


def test_lines_that_stand_there_twice_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps({"step": step, "at": at}) + "\n"
            for at, step in enumerate([0, 1, 2, 3, 1, 2, 4])
        )
    )
    assert [(line["step"], line["at"]) for line in read_metrics(path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 6),
    ]


def test_numbers_read_back_exactly(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"x": 0.1 + 0.2, "y": 1e-300})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 0.1 + 0.2, "y": 1e-300}]


def test_a_progress_line_says_where_the_run_is_and_when_it_will_be_done():
    line = progress_line(15, 60, LINE, steps_done=5, elapsed_s=10.0)
    for part in (
        "step 15/60",
        "reward 0.500",
        "eval/heldout 0.875",
        "1,234 tok/s",
        "0.75 s",
        "eta 1:30",
    ):
        assert part in line, line


def test_a_progress_line_shows_what_moves_and_no_reward_where_there_is_none():
    line = progress_line(1, 3, {**LINE, "train/pg_loss": -0.0045}, steps_done=1, elapsed_s=1.0)
    assert "pg_loss -0.0045" in line and " loss " not in line
    rows = {**LINE, "rollout/num_tokens": 3412.0}
    supervised = progress_line(1, 3, rows, steps_done=1, elapsed_s=1.0, is_supervised=True)
    assert "3,412 tokens  loss -0.0100" in supervised and "reward 0.500" not in supervised


def test_nothing_is_learned_where_no_group_has_two_rewards():
    assert nothing_to_learn({"rollout/zero_std_groups": 4}, 4)
    assert not nothing_to_learn({"rollout/zero_std_groups": 3}, 4)
    assert not nothing_to_learn({}, 4), "nothing was generated"


def test_durations_read_like_a_clock():
    assert [duration(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_only_rewards_of_evaluations_count_as_such():
    assert eval_rewards({**LINE, "eval/heldout/truncated_frac": 0.0}) == [
        "eval/heldout/reward_mean"
    ]


class Ownership:
    """Whose the run is, as ``check`` of an attempt sees it: it may be asked just before another one
    takes over.
    """

    def __init__(self):
        self.newest = 0

    def checks(self, attempt):
        def check():
            if attempt < self.newest:
                raise Fenced("it belongs to a newer attempt")

        return check


@pytest.mark.parametrize("what", ["begins", "goes on"])
def test_an_older_attempt_that_wakes_anywhere_changes_nothing_of_the_newer_ones_file(
    tmp_path, what
):
    """Whether it hangs while it makes its file or while it appends; the newer one finishes the run
    before it wakes.
    """
    for number in range(1, 100):
        path, owner = tmp_path / f"{number}.jsonl", Ownership()
        before = MetricsWriter(path)
        for step in range(4):
            before.write(step, {"by": 0})
        old = MetricsWriter(path, check=owner.checks(0))
        with pytest.MonkeyPatch.context() as patched:
            if what == "goes on":
                old.rewind(3)
            paused = PausedThread(number, patched)
            act = (
                partial(old.write, 4, {"by": "old"})
                if what == "goes on"
                else partial(old.rewind, 1)
            )
            stopped = paused.run(act, expected=(OSError, Fenced))
            try:
                owner.newest = 1
                new = MetricsWriter(path, check=owner.checks(1))
                new.rewind(1)
                for step in range(2, 8):
                    new.write(step, {"by": "new"})
                there = path.read_bytes()
            finally:
                paused.resume.set()
                paused.thread.join(20)
        with pytest.raises(Fenced):
            old.write(5, {"by": "old"})
        assert path.read_bytes() == there, f"after call {number}"
        assert [line["step"] for line in read_metrics(path)] == list(range(8))
        new.write(8, {"by": "new"})
        assert [line["step"] for line in read_metrics(path)] == list(range(9))
        if not stopped:
            assert number > 2
            return
    raise AssertionError("it never came to its end")


def test_a_file_that_a_person_removed_is_made_again(tmp_path):
    writer = MetricsWriter(tmp_path / "m")
    writer.write(1, {"x": 1})
    (tmp_path / "m").unlink()
    writer.write(2, {"x": 2})
    (tmp_path / "m").write_text('{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n')
    writer.write(3, {"x": 3})
    assert [line["step"] for line in read_metrics(tmp_path / "m")] == [1, 2, 3]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "fsync"])
async def test_a_line_that_cannot_be_written_is_written_with_the_next_one(
    tmp_path, monkeypatch, caplog, number, call
):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    await writer.begin(0)
    await writer.put(1, {"x": 1})
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(getattr(os, call), number))
        await writer.put(2, {"x": 2})
        await writer.put(3, {"x": 3})
    assert os.strerror(number) in caplog.text and "metrics.jsonl" in caplog.text
    await writer.put(4, {"x": 4})
    assert is_open(tmp_path / "metrics.jsonl")
    writer.close()
    assert not is_open(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": step, "x": step} for step in range(1, 5)
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4, "no half line is left"


def is_open(path):
    """Whether this process holds a descriptor of the file."""
    return str(path) in {file.path for file in psutil.Process().open_files()}


def failing(call, number):
    """Half a write, then the error; an fsync fails at once."""

    def fails(descriptor, *data):
        if data:
            call(descriptor, bytes(data[0])[:7])
        raise OSError(number, os.strerror(number))

    return fails


async def test_an_fsync_that_hangs_does_not_stop_the_event_loop(tmp_path, monkeypatch, caplog):
    answers = threading.Event()
    monkeypatch.setattr("rlpost.durable.run_files.DEADLINE_S", 1.0)
    fsync = os.fsync
    try:
        async with asyncio.timeout(30):
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            writer = MetricsWriter(tmp_path / "metrics.jsonl")
            await writer.begin(0)
            monkeypatch.setattr(
                os, "fsync", lambda descriptor: answers.wait(20) and fsync(descriptor)
            )
            started = time.monotonic()
            for step in range(1, 5):
                await writer.put(step, {"x": step})
            assert time.monotonic() - started < 5 and ticks >= 5
            assert "takes more than 1 s and continues in the background" in caplog.text
            await asyncio.to_thread(writer.close)
            assert is_open(tmp_path / "metrics.jsonl"), "a write that hangs may still use it"
            answers.set()
            await asyncio.to_thread(writer.close)
            ticking.cancel()
    finally:
        answers.set()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
