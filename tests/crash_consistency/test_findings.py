"""Regression tests for the findings of an audit; ``findings.FINDINGS`` names them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.durable.commit import COMMITTED, checkpoint_name
from rlpost.durable.segment_writer import SegmentWriter, create_file
from tests.crash_consistency import fakes, oracle
from tests.crash_consistency.hooks import FaultAt, KillAt, Paused, StopAt
from tests.crash_consistency.interception import ROOM, Hook, Op
from tests.crash_consistency.oracle import (
    Problem,
    baseline,
    check,
    destroyed,
    metrics_lines,
    num_committed,
)
from tests.crash_consistency.scenarios import DEADLINES, PATHS, Trial, run_trial
from tests.crash_consistency.world import NUM_STEPS, SETUPS, World, rows


def named(step: int) -> Callable[[Op], bool]:
    """Match the rename that gives a checkpoint its name."""
    return lambda op: (
        op.kind == "rename" and op.path.endswith(f"checkpoints/{checkpoint_name(step)}")
    )


def pairs(one: Sequence[Any], two: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which every two values of different arguments meet.

    ``third`` is the shortest. The trials of ``test_trials`` draw from all combinations.
    """
    assert len(third) <= min(len(one), len(two))
    return [
        (first, second, third[(i + j) % len(third)])
        for i, first in enumerate(one)
        for j, second in enumerate(two)
    ]


def marked(step: int) -> Callable[[Op], bool]:
    """Match the rename that marks a checkpoint as committed."""
    return lambda op: (
        op.kind == "rename" and op.path.endswith(f"{checkpoint_name(step)}/{COMMITTED}")
    )


def line_written(file: str) -> Callable[[Op], bool]:
    """Match a line appended to a file."""
    return lambda op: op.kind == "write" and Path(file).name in op.path


def expect_none(problems: Sequence[Problem]) -> None:
    """Assert that the run equals an undisturbed one."""
    assert not problems, "\n".join(map(str, problems))


def finish(world: World) -> None:
    """Run undisturbed attempts until the run is done."""
    for _ in range(3):
        if world.attempt().how == "done":
            return


@pytest.mark.parametrize("setup", ["sync", "sync,keep1", "one_step_off", "fully_async,async_save"])
def test_f1_an_older_attempt_does_not_change_the_checkpoint_of_a_newer_one(
    base: Path, setup: str
) -> None:
    reference, world = baseline(base, SETUPS[setup]), World(base, SETUPS[setup])
    step = 1 if setup == "sync,keep1" else 2
    older = Paused(world)
    older.run_until(0, "after", named(step))
    newer = Paused(world)
    newer.run_until(0, "after", marked(step))
    older.run_until(None)
    assert older.is_over
    expect_none(destroyed(world))
    newer.run_until(None)
    expect_none(check(world, reference=reference, was_killed=False))
    finish(world)
    expect_none(check(world, reference=reference, was_killed=False))


def damaged_segment(path: Path, how: str) -> None:
    """Damage a segment of the journal."""
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return
    if how == "flip":
        data[12] ^= 1  # in its header
    elif how == "last":
        data[-1] ^= 1  # in its last record
    path.write_bytes(b"" if how == "empty" else bytes(data))


@pytest.mark.parametrize(
    ("setup", "how", "which"),
    pairs(
        ("sync,slow_save", "one_step_off,slow_save", "fully_async,slow_save"),
        ("flip", "last", "empty", "delete"),
        ("first", "middle", "last"),
    ),
)
def test_f2_a_damaged_segment_of_the_journal_costs_work_and_nothing_else(
    base: Path, setup: str, how: str, which: str
) -> None:
    reference, world = baseline(base, SETUPS[setup]), World(base, SETUPS[setup])
    world.attempt(KillAt(0, matches=named(2)))
    segments = sorted((world.run.checkpoints / "journal").glob("*.log"))
    assert len(segments) >= 3, "slow saves leave several segments"
    damaged_segment(segments[{"first": 0, "middle": len(segments) // 2, "last": -1}[which]], how)
    world.disk.model.adopt()
    finish(world)
    expect_none(check(world, reference=reference, was_killed=False))


@pytest.mark.parametrize("file", ["metrics.jsonl", "report/samples.jsonl"])
@pytest.mark.parametrize("setup", ["sync", "fully_async"])
def test_f3_an_older_attempt_does_not_change_the_lines_of_a_newer_one(
    base: Path, setup: str, file: str
) -> None:
    reference, world = baseline(base, SETUPS[setup]), World(base, SETUPS[setup])
    older = Paused(world)
    older.run_until(1, "before", line_written(file))
    finish(world)
    older.run_until(None)
    world.endings.sort(key=lambda ending: ending.attempt.name)
    expect_none(check(world, reference=reference, was_killed=False))


@pytest.mark.parametrize("damage", [b"\xff", b"#"])
@pytest.mark.parametrize("file", ["metrics.jsonl", "report/samples.jsonl"])
def test_f3_a_damaged_line_loses_only_that_line(base: Path, file: str, damage: bytes) -> None:
    reference, world = baseline(base, SETUPS["sync"]), World(base, SETUPS["sync"])
    world.attempt(KillAt(0, matches=marked(6)))
    path = world.run.root / file
    lines = path.read_bytes().split(b"\n")
    step = json.loads(lines[1])["step"]
    lines[1] = damage + lines[1][1:]
    path.write_bytes(b"\n".join(lines))
    world.disk.model.adopt()
    finish(world)
    lost = {"lost_lines": {step}} if file == "metrics.jsonl" else {"lost_samples": {step}}
    expect_none(check(world, reference=reference, was_killed=False, **lost))


@pytest.mark.parametrize("setup", ["fully_async", "fully_async,filter", "one_step_off"])
def test_f4_skipped_rows_are_counted_once(base: Path, setup: str) -> None:
    reference = baseline(base, SETUPS[setup])
    found = []
    for number in range(1, reference.num_changes, 36):  # others are drawn by test_trials
        result = run_trial(base, Trial("kill", setup, "before", number))
        found += [f"{result.trial}: {problem}" for problem in result.problems]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", ["grown", "shrunk", "edited", "worse", "moved"])
@pytest.mark.parametrize("setup", ["sync", "one_step_off", "fully_async"])
def test_f5_other_data_is_noticed_while_only_the_journal_exists(
    base: Path, setup: str, kind: str
) -> None:
    number = first_commit(base, setup)
    result = run_trial(base, Trial("change", setup, kind, number))
    assert result.note == "journal only"
    expect_none(result.problems)


def first_commit(base: Path, setup: str) -> int:
    """Number of the operation that gives the first checkpoint its name."""
    return next(op.number for op in baseline(base, SETUPS[setup]).ops if named(2)(op))


def test_f6_a_line_of_the_ledger_without_its_key_is_skipped(base: Path) -> None:
    reference, world = baseline(base, SETUPS["sync"]), World(base, SETUPS["sync"])
    world.attempt(KillAt(0, matches=named(4)))
    path = world.run.ledger.path
    path.write_text(path.read_text().replace('"event"', '"evend"', 1))
    world.disk.model.adopt()
    finish(world)
    expect_none(check(world, reference=reference, was_killed=False))


@pytest.mark.parametrize(
    ("error", "path", "number"),
    pairs(
        ("ENOSPC", "EIO", "EROFS"),
        ("metrics", "samples", "ledger", "journal", "owner", "checkpoint"),
        (0, 3, 12),
    ),
)
def test_f7_failing_storage_ends_an_attempt_with_a_message_and_no_traceback(
    base: Path, error: str, path: str, number: int
) -> None:
    reference, world = baseline(base, SETUPS["sync"]), World(base, SETUPS["sync"])
    fault = FaultAt(number, error, float("inf"), lambda op: op.changes and PATHS[path](op))
    ending = world.attempt(fault)
    assert ending.how in ("done", "failed"), ending.what or ending.messages
    assert ending.how == "done" or ending.messages
    if ending.how != "done":
        finish(world)
    expect_none(check(world, reference=reference, was_killed=False, lossy=True))


def test_f7_the_file_latest_is_for_people_and_no_commit_needs_it(base: Path) -> None:
    reference, world = baseline(base, SETUPS["sync"]), World(base, SETUPS["sync"])
    ending = world.attempt(
        FaultAt(0, "ENOSPC", float("inf"), lambda op: op.changes and PATHS["latest"](op))
    )
    assert ending.how == "done", ending
    assert num_committed(world) == 3
    expect_none(check(world, reference=reference))


@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_f7_an_unreadable_segment_causes_no_traceback(base: Path, error: str) -> None:
    reference, world = baseline(base, SETUPS["sync"]), World(base, SETUPS["sync"])
    world.attempt(KillAt(0, matches=named(4)))
    segment = FaultAt(1, error, 1, lambda op: op.kind == "read" and op.path.endswith(".log"))
    assert world.attempt(segment).how in ("done", "failed"), world.endings[-1].what
    assert segment.hit
    finish(world)
    expect_none(check(world, reference=reference, was_killed=False))


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("path", ["metrics", "samples", "ledger", "journal"])
def test_f7_an_fsync_that_never_returns_does_not_stop_the_event_loop(
    base: Path, path: str, number: int
) -> None:
    reference, world = baseline(base, SETUPS["sync"]), World(base, SETUPS["sync"])
    fault = FaultAt(number, "hang", 1, lambda op: op.kind == "fsync" and PATHS[path](op))
    ending = world.attempt(fault)
    assert fault.hit
    assert ending.how in ("done", "failed", "waiting"), ending.what
    if ending.how != "done":
        finish(world)
    expect_none(check(world, reference=reference, was_killed=False, lossy=True))


def of_journal(*kinds: str) -> Callable[[Op], bool]:
    """Match operations of these kinds on the journal."""
    return lambda op: op.kind in kinds and "checkpoints/journal" in op.path


@pytest.mark.parametrize("kind", ["mkdir", "list", "stat", "create", "link", "fsync"])
@pytest.mark.parametrize("setup", ["sync", "fully_async"])
def test_a_journal_that_hangs_at_the_start_ends_the_attempt_with_a_message(
    base: Path, setup: str, kind: str
) -> None:
    reference, world = baseline(base, SETUPS[setup]), World(base, SETUPS[setup])
    if kind != "mkdir":
        world.attempt(KillAt(0, matches=named(2)))
    fault = FaultAt(0, "hang", 1, of_journal(kind))
    ending = world.attempt(fault)
    assert fault.hit and ending.how == "failed", ending
    assert (
        "checkpoints/journal was not" in ending.messages[-1] and " within 6" in ending.messages[-1]
    )
    assert "repair the storage or the mount" in ending.messages[-1]
    finish(world)
    expect_none(check(world, reference=reference))


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("kind", ["create", "link", "write", "fsync"])
@pytest.mark.parametrize("setup", ["sync", "fully_async"])
def test_a_journal_that_hangs_later_costs_the_journal_and_nothing_else(
    base: Path, setup: str, kind: str, number: int
) -> None:
    """The event loop keeps running, and the journal restarts at the next checkpoint."""
    reference, world = baseline(base, SETUPS[setup]), World(base, SETUPS[setup])
    number = min(number, 3) if kind in ("create", "link") else 2 + number
    fault = FaultAt(number, "hang", 1, of_journal(kind))
    ending = world.attempt(fault)
    assert fault.hit and ending.how == "done", ending
    assert any("is no longer written" in message for message in ending.messages)
    expect_none(check(world, reference=reference))


@pytest.mark.parametrize("setup", ["sync", "fully_async"])
def test_a_group_that_cannot_be_read_in_time_ends_the_attempt_without_blocking_its_event_loop(
    base: Path, setup: str
) -> None:
    reference, world = baseline(base, SETUPS[setup]), World(base, SETUPS[setup])
    world.attempt(KillAt(0, matches=named(2)))
    since = []

    def replays(op: Op) -> bool:
        """Match a read of the journal after the attempt's first ledger line."""
        since.extend([op] if line_written("ledger.jsonl")(op) else [])
        return bool(since) and of_journal("read")(op)

    fault = FaultAt(0, "hang", 1, replays)
    ending = world.attempt(fault)
    assert fault.hit and ending.how == "failed", ending
    assert "checkpoints/journal were not read within 60 s" in ending.messages[-1]
    finish(world)
    expect_none(check(world, reference=reference))


def test_the_end_of_a_replay_does_not_block_the_event_loop(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data has changed without changing its fingerprint, so the rest goes to a new segment."""
    world = World(base, SETUPS["sync"])
    monkeypatch.setattr("rlpost.driver.driver.data_fingerprint", lambda *_: "the same")
    world.attempt(KillAt(0, matches=named(2)))
    world.write_data([line.replace("question", "riddle") for line in rows()])
    fault = FaultAt(1, "hang", 1, of_journal("create"))
    ending = world.attempt(fault)
    assert fault.hit and ending.how == "done", ending
    assert any("reads differently now" in message for message in ending.messages)
    assert any(
        "a new segment took more than 60 s" in each or "an fsync took" in each
        for each in ending.messages
    )


def test_a_newer_attempt_continues_when_an_older_one_takes_the_number_of_its_segment(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both used to end with exit code 78, and nothing requeued the job."""
    taken = []

    def create(path: Path, records: Iterable[bytes]) -> None:
        try:
            create_file(path, records)
        except FileExistsError:
            taken.append(path.name)
            raise

    monkeypatch.setattr("rlpost.durable.segment_writer.create_file", create)
    result = run_trial(base, Trial.named("two_attempts/one_step_off,partial/before:some/14/23757"))
    assert taken, "another trial has to be found: no number was taken in this one"
    assert result.note == "older refused, newer done"
    expect_none(result.problems)


@pytest.mark.parametrize("when", ["resume", "state"])
@pytest.mark.parametrize("setup", ["sync", "one_step_off", "fully_async"])
def test_of_two_attempts_that_create_a_segment_at_the_same_time_the_owner_continues(
    base: Path, setup: str, when: str
) -> None:
    """The older attempt takes the number while the newer one pauses before naming its segment."""
    reference, world = baseline(base, SETUPS[setup]), World(base, SETUPS[setup])
    older = Paused(world)
    older.run_until(0 if when == "resume" else 1, "before", of_journal("create"))
    newer = Paused(world)
    newer.run_until(0, "before", of_journal("link"))
    older.run_until(None)
    newer.run_until(None)
    world.endings.sort(key=lambda ending: ending.attempt.name)
    assert [ending.how for ending in world.endings] == ["refused", "done"]
    expect_none(check(world, reference=reference, was_killed=False))
    finish(world)
    expect_none(check(world, reference=reference, was_killed=False))


@pytest.mark.parametrize("setup", ["sync", "one_step_off", "fully_async"])
def test_f8_the_journal_outlives_a_power_loss_before_the_first_checkpoint(
    base: Path, setup: str
) -> None:
    result = run_trial(base, Trial("power", setup, "strict", first_commit(base, setup)))
    assert result.endings[0].attempt.observed.trained, (
        "something was trained, so its batch is durable"
    )
    expect_none(result.problems)


@pytest.mark.parametrize("setup", ["sync", "one_step_off", "fully_async,async_save"])
def test_a_disk_that_was_full_for_a_while_costs_no_generated_group(base: Path, setup: str) -> None:
    """Checkpoints and journal find no space for 8 operations; two steps later, the attempt dies."""

    def needs_space(op: Op) -> bool:
        return op.kind in ("create", "write") and "checkpoints/" in op.path

    reference, found, num_killed = baseline(base, SETUPS[setup]), [], 0
    for number in range(8, 32, 3):  # each starts within the 8 operations of the one before
        world = World(base, SETUPS[setup])
        full = FaultAt(number, "ENOSPC", 8, needs_space)

        def has_room(op: Op, full: FaultAt = full) -> bool:
            return full.seen > full.number + full.count and line_written("metrics.jsonl")(op)

        num_killed += world.attempt(full, KillAt(1, matches=has_room)).how == "killed"
        finish(world)
        found += [f"{number}: {each}" for each in check(world, reference=reference)]
    assert not found, "\n".join(found)
    assert num_killed >= 3


@pytest.mark.parametrize("setup", ["sync", "one_step_off", "fully_async,slow_save"])
def test_every_record_is_on_disk_after_half_a_second_whatever_the_loop_awaits(
    base: Path, setup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step trains for 3 s and a weight update takes 2 s; nothing else asks for an fsync then."""
    waiting: dict[SegmentWriter, list[tuple[float, int]]] = defaultdict(list)
    ages, append, sync = [], SegmentWriter.append, SegmentWriter._sync_written

    def append_and_note(writer: SegmentWriter, content: bytes, part: Any = None) -> None:
        append(writer, content, part)
        waiting[writer].append((ROOM.attempt.clock, writer._queued))

    def sync_and_note(writer: SegmentWriter) -> None:
        sync(writer)
        done = [one for one in waiting[writer] if one[1] <= writer._synced]
        ages.extend(ROOM.attempt.clock - appended_at for appended_at, _ in done)
        waiting[writer] = [one for one in waiting[writer] if one not in done]

    monkeypatch.setattr(SegmentWriter, "append", append_and_note)
    monkeypatch.setattr(SegmentWriter, "_sync_written", sync_and_note)
    for name, seconds in (("TRAIN_S", 3.0), ("SYNC_S", 2.0), ("GRADE_S", 0.7)):
        monkeypatch.setattr(fakes, name, seconds)
    assert World(base, SETUPS[setup]).attempt().how == "done"
    assert len(ages) > 40 and max(ages) <= 0.5
    assert not any(waiting.values())


def test_f9_the_checkpoint_just_committed_is_never_pruned(base: Path) -> None:
    setup = SETUPS["sync,keep_every"]  # --keep-last 1 --keep-every 2, one save a step
    reference, world = baseline(base, setup), World(base, setup)
    world.attempt(KillAt(0, matches=named(5)))
    shard = world.run.checkpoints / checkpoint_name(4) / "shard-0.json"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + b"]")
    world.disk.model.adopt()
    since = num_committed(world)
    world.attempt(KillAt(0, matches=named(4)))  # it resumes from step 2 and commits step 3
    assert num_committed(world) == since + 1
    expect_none(destroyed(world, since))
    finish(world)
    expect_none(check(world, reference=reference, was_killed=False, committed_since=since))


@pytest.mark.parametrize("setup", ["sync,async_save", "fully_async,partial"])
def test_a_checkpoint_that_is_saved_again_survives_a_power_loss(base: Path, setup: str) -> None:
    """A stop right after a checkpoint saves its step again and first moves the earlier save."""
    reference, problems = baseline(base, SETUPS[setup]), []
    committed = next(op.number for op in reference.ops if marked(2)(op))

    def disturb(*hooks: Hook) -> World:
        world = World(base, SETUPS[setup])
        stop = StopAt(world, committed + 1, DEADLINES["checkpoint"])
        world.attempt(stop, *hooks)
        return world

    ops = disturb().endings[0].attempt.ops
    aside, deleted = (op.number for op in ops if op.kind == "rename" and ".replaced-" in op.path)
    for number in range(aside, deleted + 2):
        world = disturb(KillAt(number))
        world.disk.model.lose_power("strict", world.rng)
        finish(world)
        problems += check(world, reference=reference)
    expect_none(problems)


def test_an_undisturbed_run_has_no_problem_in_any_configuration(base: Path) -> None:
    for setup in SETUPS.values():
        assert len(baseline(base, setup).lines) == NUM_STEPS + 1  # it checks itself


def test_the_oracle_finds_each_kind_of_problem(base: Path) -> None:
    """The oracle finds each kind of damage to a good run; otherwise no trial could fail."""
    reference = baseline(base, SETUPS["sync"])

    def problems(disturb: Callable[[World], object]) -> set[str]:
        world = World(base, SETUPS["sync"])
        world.attempt()
        disturb(world)
        return {problem.category for problem in check(world, reference=reference)}

    def history(world: World) -> list:
        return world.endings[-1].attempt.observed.history

    def swap(world: World) -> None:
        batches = history(world)
        batches[2], batches[3] = batches[3], batches[2]

    def lines(path: str, change: Callable[[list[str]], list[str]]) -> Callable[[World], object]:
        def act(world: World) -> None:
            file = world.run.root / path
            file.write_text("".join(change(file.read_text().splitlines(keepends=True))))

        return act

    assert problems(lambda world: None) == set()
    assert {oracle.STALE} <= problems(swap)
    assert {oracle.PROMPTS, oracle.WEIGHTS} <= problems(
        lambda world: history(world).append(history(world)[0])
    )
    assert oracle.PROMPTS in problems(lambda world: world.write_data(rows()[::-1]))
    for path, category in (
        ("metrics.jsonl", oracle.METRICS),
        ("report/samples.jsonl", oracle.SAMPLES),
    ):
        assert category in problems(lines(path, lambda found: found[:-1]))
        assert category in problems(lines(path, lambda found: [*found, found[-1]]))
    assert oracle.LEDGER in problems(lines("ledger.jsonl", lambda found: found[:-1]))
    assert oracle.COUNTS in problems(
        lines(
            "metrics.jsonl",
            lambda found: [line.replace('bad_prompts": 1', 'bad_prompts": 3') for line in found],
        )
    )
    newest = f"checkpoints/{checkpoint_name(6)}/shard-0.json"
    assert oracle.DESTROYED in problems(lambda world: (world.run.root / newest).write_text("{}"))
    assert [line["step"] for line in metrics_lines(World(base, SETUPS["sync"]).run.metrics)] == []
