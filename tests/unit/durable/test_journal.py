"""The journal's files: exact round trips, truncation, damage, several attempts, failing storage."""

import asyncio
import contextlib
import errno
import os
import random
import resource
import signal
import threading
import time

import pytest

from rlpost.durable import segment_writer
from rlpost.durable.journal import Journal
from rlpost.durable.journal_chain import read_folder
from rlpost.durable.journal_format import BATCH, GROUP
from rlpost.durable.journal_segments import read_segment
from rlpost.durable.ownership import claim
from rlpost.durable.result_settings import ResultSettings
from rlpost.errors import CheckpointError, Fenced
from rlpost.types import Sample, SampleGroup, ScoredSample


def group(prompt_id, *lengths):
    rng = random.Random(prompt_id)

    def sample(index, length):
        logprobs = tuple(-rng.expovariate(1.0) for _ in range(length))
        ids = tuple(rng.randrange(2**31 - 1) for _ in range(length))
        return Sample(
            prompt_id,
            index,
            (1, 2, prompt_id),
            ids,
            logprobs,
            "é" * length,
            "stop",
            3,
            label="\ud8004",
        )

    return SampleGroup(
        prompt_id, tuple(ScoredSample(sample(*each), 0.1 * each[0]) for each in enumerate(lengths))
    )


def resumed(folder, base=0, step=0, settings="s", **named):
    return Journal.resume(folder, base, step=step, settings=settings, **named)


def begin(journal, step):
    """Begin a segment for the state after ``step`` steps."""
    return asyncio.run(journal.begin(step))


def durable(journal):
    asyncio.run(journal.durable())


def replayed(journal):
    """Drain ``again()``; return its records as (kind, prompt id or prompt ids)."""
    found = []
    while records := list(journal.again()):
        found += [
            (r.kind, r.meta["prompt_id"] if r.kind == GROUP else r.meta["prompt_ids"])
            for r in records
        ]
    return found


def test_records_after_a_state_are_replayed_in_order_and_once(tmp_path):
    journal = resumed(tmp_path)
    for prompt_id in (2, 0, 1):
        journal.append_group(group(prompt_id, 3, 4), wanted=prompt_id != 0)
    journal.batch(0, [group(1), group(2)], {"rollout/num_filtered": 1.0})
    journal.append_evaluation(1, {"eval/x": 0.5})
    journal.append_group(group(3), wanted=True)
    journal.close()
    journal = resumed(tmp_path)
    assert journal.num_batches == 1
    first = list(journal.again())
    assert [(r.kind, r.meta.get("prompt_id"), r.meta.get("wanted")) for r in first[:3]] == [
        (GROUP, 2, True),
        (GROUP, 0, False),
        (GROUP, 1, True),
    ]
    assert first[3].meta == {
        "step": 0,
        "prompt_ids": [1, 2],
        "counts": {"rollout/num_filtered": 1.0},
    }
    assert journal.evaluation(1) == {"eval/x": 0.5} and journal.evaluation(0) is None
    assert replayed(journal) == [(GROUP, 3)]
    assert replayed(journal) == []


def test_compaction_removes_segments_that_no_kept_checkpoint_needs(tmp_path):
    journal = resumed(tmp_path)
    numbers = [begin(journal, step) for step in (10, 20, 30)]
    journal.compact(20)
    assert [segment.header.number for segment in read_folder(tmp_path)[0]] == numbers[1:]
    journal.compact(30)
    assert [segment.header.number for segment in read_folder(tmp_path)[0]] == numbers[2:]


@pytest.mark.parametrize("cut", ["in the frame", "in the body", "a flipped bit"])
def test_a_torn_tail_is_ignored_and_reported(tmp_path, caplog, cut):
    journal = resumed(tmp_path)
    journal.append_group(group(0, 5), wanted=True)
    journal.append_group(group(1, 5), wanted=True)
    journal.close()
    path = tmp_path / "0000000.log"
    last = read_segment(path).records[-1]
    data = bytearray(path.read_bytes())
    if cut == "a flipped bit":
        data[-3] ^= 4
    else:
        del data[last.offset + (3 if cut == "in the frame" else 20) :]
    path.write_bytes(bytes(data))
    journal = resumed(tmp_path)
    assert f"{path}: " in caplog.text and str(last.offset) in caplog.text
    assert replayed(journal) == [(GROUP, 0)]


def settings_of(**values):
    return ResultSettings({"rm_type": "math"}, {"lr": 1.0, **values}).to_json()


@pytest.mark.parametrize("changed", ["training", "generation"])
def test_other_settings_of_training_cost_what_later_weights_have_generated(
    tmp_path, caplog, changed
):
    """The batch of the checkpoint's own weights is trained again, with the new settings."""
    journal = resumed(tmp_path, settings=settings_of())
    journal.append_group(group(0), wanted=True)
    journal.batch(0, [group(0)], {})
    journal.append_evaluation(0, {"eval/x": 1.0})
    journal.append_evaluation(1, {"eval/x": 2.0})
    journal.close()
    now = settings_of(lr=2.0)
    if changed == "generation":
        now = ResultSettings({"rm_type": "f1"}, {"lr": 2.0}).to_json()
    journal = resumed(tmp_path, settings=now)
    assert "lr: 1.0 -> 2.0" in journal.changes
    if changed == "generation":
        assert "rm_type: 'math' -> 'f1'" in caplog.text
        assert (journal.newest_usable, replayed(journal)) == (None, [])
        return
    assert journal.newest_usable == 0
    assert [record.kind for record in journal.waiting] == [GROUP, BATCH]
    assert "settings of the training have changed since: lr: 1.0 -> 2.0" in caplog.text
    assert journal.evaluation(0) == {"eval/x": 1.0} and journal.evaluation(1) is None
    assert resumed(tmp_path, settings=now).newest_usable is None, "the copy has the new settings"


def owning(save, number):
    """Return the journal of a newer attempt, which claims the folder first."""
    return resumed(save / "journal", check=claim(save, f"{number} of run").check)


def test_an_older_attempt_that_is_still_alive_is_harmless_and_ends_at_its_next_state(tmp_path):
    old = owning(tmp_path, 0)
    old.append_group(group(0), wanted=True)
    durable(old)
    new = owning(tmp_path, 1)
    old.append_group(group(1), wanted=True)
    new.append_group(group(2), wanted=True)
    with pytest.raises(Fenced, match=r"belongs to attempt 1 of run .* this is attempt 0 of run"):
        begin(old, 1)
    old.append_group(group(3), wanted=True)
    with pytest.raises(Fenced):
        durable(old)
    old.close()
    new.close()
    assert replayed(resumed(tmp_path / "journal")) == [(GROUP, 0), (GROUP, 2)]


@pytest.mark.parametrize("has_links", [True, False])
def test_an_older_attempt_that_takes_the_next_number_loses_no_records_of_the_owner(
    tmp_path, monkeypatch, has_links
):
    """The older attempt creates it between listing and creation in the newer one's resume.

    Its records are not used.
    """
    real = segment_writer.create_file
    if not has_links:
        monkeypatch.setattr(os, "link", no_hard_links)
    old = owning(tmp_path, 0)
    old.append_group(group(0), wanted=True)

    def second(path, frames):
        monkeypatch.setattr(segment_writer, "create_file", real)
        begin(old, 1)
        old.append_group(group(1), wanted=True)
        durable(old)
        real(path, frames)

    durable(old)
    monkeypatch.setattr(segment_writer, "create_file", second)
    new = owning(tmp_path, 1)
    assert (tmp_path / "journal/0000001.log").exists(), "it is the older attempt's"
    new.append_group(group(2), wanted=True)
    number = begin(new, 1)
    new.append_group(group(3), wanted=True)
    with pytest.raises(Fenced):
        begin(old, 2)
    new.close()
    assert number == 3
    waiting = (GROUP, 0)
    assert replayed(resumed(tmp_path / "journal", number, 1)) == [waiting, (GROUP, 3)]
    assert replayed(resumed(tmp_path / "journal")) == [waiting, (GROUP, 2), (GROUP, 3)]


def no_hard_links(source, target):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source), None, str(target))


def test_a_state_takes_and_returns_the_next_free_number(tmp_path):
    journal = owning(tmp_path, 0)
    journal.append_group(group(0), wanted=True)
    (tmp_path / "journal/0000001.log").write_bytes(b"")
    number = begin(journal, 1)
    journal.append_group(group(1), wanted=True)
    journal.close()
    assert number == 2
    assert replayed(resumed(tmp_path / "journal", number, 1)) == [(GROUP, 1)]
    assert replayed(resumed(tmp_path / "journal")) == [(GROUP, 0), (GROUP, 1)]


def test_when_every_number_is_taken_the_run_continues_without_a_journal_until_the_next_state(
    tmp_path, monkeypatch, caplog
):
    def taken(path, frames):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), "partial", None, str(path))

    with monkeypatch.context() as patched:
        patched.setattr(segment_writer, "create_file", taken)
        journal = owning(tmp_path, 0)
    assert not journal.is_written
    assert (
        f"0000016.log and the {segment_writer.MAX_TAKEN} files before it were created"
        in caplog.text
    )
    number = begin(journal, 1)
    journal.append_group(group(0), wanted=True)
    journal.close()
    assert replayed(resumed(tmp_path / "journal", number, 1)) == [(GROUP, 0)]


@pytest.fixture
def held(monkeypatch):
    """Block calls of a function of ``os`` until ``go_on`` is set or the test ends."""

    class Held:
        def __init__(self):
            self.begun, self.go_on = threading.Event(), threading.Event()

        def hold(self, name, matches=lambda *given: True):
            real = getattr(os, name)

            def wait(*given, **named):
                if matches(*given):
                    self.begun.set()
                    self.go_on.wait(20)
                return real(*given, **named)

            monkeypatch.setattr(os, name, wait)

    found = Held()
    yield found
    found.go_on.set()


async def ticks(coroutine):
    """Return how often a 10 ms timer fired until a coroutine was done."""
    task, count = asyncio.create_task(coroutine), 0
    while not task.done():
        await asyncio.sleep(0.01)
        count += 1
    await task
    return count


def test_a_hanging_write_blocks_only_its_waiters_and_not_the_event_loop(
    tmp_path, monkeypatch, held, caplog
):
    """Records that a crash loses from the queue do not exist for the next attempt."""
    monkeypatch.setattr(segment_writer, "DEADLINE_S", 1.0)
    journal = resumed(tmp_path)
    journal.append_group(group(0), wanted=True)
    durable(journal)
    held.hold("write")

    async def run():
        started = time.monotonic()
        for number in range(1, 9):
            journal.append_group(group(number), wanted=True)
        journal.batch(0, [group(1)], {})
        journal.append_evaluation(0, {"eval/x": 1.0})
        assert time.monotonic() - started < 5
        assert await ticks(journal.durable()) > 5

    asyncio.run(run())
    assert not journal.is_written and "an fsync took more than 1 s" in caplog.text
    held.go_on.set()
    written = [(GROUP, 0), (GROUP, 1)]  # the last one is the write that hung
    assert replayed(resumed(tmp_path)) in (written, written[:1])


def test_the_records_that_wait_for_a_write_are_bounded_in_memory(
    tmp_path, monkeypatch, held, caplog
):
    monkeypatch.setattr(segment_writer, "MAX_PENDING_BYTES", 2**20)
    journal = resumed(tmp_path)
    held.hold("write")
    sent = 0
    while journal.is_written:
        journal.append_group(group(sent, 1000), wanted=True)
        sent += 1
        assert sent < 1000
    assert 40 < sent < 140, "a record of 8 kB and its text"
    assert "more than 1 MiB wait to be written" in caplog.text
    held.go_on.set()
    number = begin(journal, 1)
    journal.append_group(group(1), wanted=True)
    journal.close()
    assert replayed(resumed(tmp_path, number, 1)) == [(GROUP, 1)]


async def test_the_end_of_a_replay_is_written_off_the_event_loop(tmp_path, held):
    journal = resumed(tmp_path)
    for number in range(3):
        journal.append_group(group(number), wanted=True)
    journal.close()
    journal = resumed(tmp_path)
    held.hold("link")
    started = time.monotonic()
    journal.end_at(2, step=0, why="it does not match")
    assert time.monotonic() - started < 5
    journal.append_group(group(7), wanted=True)
    waiting = asyncio.create_task(journal.durable())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    held.go_on.set()
    await waiting
    journal.close()
    assert replayed(resumed(tmp_path)) == [(GROUP, 0), (GROUP, 1), (GROUP, 7)]


@pytest.mark.parametrize("call", ["mkdir", "listdir", "stat", "link", "fsync"])
async def test_startup_on_hanging_storage_ends_at_a_deadline_and_names_the_folder(
    tmp_path, monkeypatch, held, call
):
    monkeypatch.setattr(segment_writer, "DEADLINE_S", 1.0)
    resumed(tmp_path / "save/journal").close()
    folder = tmp_path / ("new/journal" if call == "mkdir" else "save/journal")
    (tmp_path / "new").mkdir()
    held.hold(call, lambda *given: call in ("fsync", "link") or str(folder) in str(given[0]))
    with pytest.raises(
        CheckpointError,
        match=rf"{folder} was not .* within 1 s: .*; repair the storage or the mount",
    ):
        await ticks(Journal.open(folder, lambda: resumed(folder, settings="s")))
    assert held.begun.is_set()


def test_a_large_journal_has_more_time_while_it_is_opened(tmp_path, monkeypatch, held):
    monkeypatch.setattr(segment_writer, "DEADLINE_S", 1.0)
    monkeypatch.setattr(segment_writer, "SLOWEST_BYTES_PER_S", 100)
    journal = resumed(tmp_path)
    journal.append_group(group(0, 400), wanted=True)
    journal.close()
    real = read_segment

    def slow(path):
        time.sleep(1.5)
        return real(path)

    monkeypatch.setattr("rlpost.durable.journal_chain.read_segment", slow)
    journal = asyncio.run(Journal.open(tmp_path, lambda: resumed(tmp_path, settings="s")))
    assert replayed(journal) == [(GROUP, 0)]
    journal.append_group(group(1), wanted=True)
    held.hold("fsync")
    started = time.monotonic()
    durable(journal)
    assert not journal.is_written and time.monotonic() - started < 15


@contextlib.contextmanager
def full_disk(path, free):
    """Let the kernel refuse writes beyond ``free`` more bytes of a file, also within a record."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_costs_no_record(tmp_path, caplog):
    journal, path = resumed(tmp_path), tmp_path / "0000000.log"
    journal.append_group(group(0, 50), wanted=True)
    durable(journal)
    with full_disk(path, free=100):
        journal.append_group(group(1, 50), wanted=True)
        durable(journal)
        assert not journal.is_durable and journal.is_written
        journal.append_group(group(2), wanted=True)
        durable(journal)
    assert caplog.text.count("cannot be written") == 1, "it is reported once"
    assert [record.meta["prompt_id"] for record in read_segment(path).records] == [0]
    journal.append_group(group(3), wanted=True)
    durable(journal)
    assert journal.is_durable
    begin(journal, 1)
    journal.append_group(group(4), wanted=True)
    journal.close()
    assert replayed(resumed(tmp_path)) == [(GROUP, prompt_id) for prompt_id in range(5)]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_records_that_a_failed_fsync_may_have_lost_are_written_again(tmp_path, monkeypatch, error):
    """As NFS reports a full disk; the kernel may have dropped the pages by then."""
    journal, path, real = resumed(tmp_path), tmp_path / "0000000.log", os.fsync
    journal.append_group(group(0), wanted=True)
    durable(journal)
    durable_bytes = path.read_bytes()

    def lossy(file):
        with open(path, "r+b") as other:
            other.write(durable_bytes)
            other.write(bytes(path.stat().st_size - len(durable_bytes)))
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", lossy)
    journal.append_group(group(1), wanted=True)
    durable(journal)
    assert journal.lacks_space == (error != errno.EIO) and not journal.is_durable
    monkeypatch.setattr(os, "fsync", real)
    durable(journal)
    assert journal.is_durable and not journal.lacks_space
    journal.close()
    assert replayed(resumed(tmp_path)) == [(GROUP, 0), (GROUP, 1)]


def test_a_journal_that_starts_on_a_full_disk_begins_once_there_is_room(tmp_path, monkeypatch):
    resumed(tmp_path).close()
    real = segment_writer.create_file
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(path, records):
        raise no_space

    monkeypatch.setattr(segment_writer, "create_file", refuse)
    journal = resumed(tmp_path)
    journal.append_group(group(1), wanted=True)
    durable(journal)
    assert journal.lacks_space and not journal.is_durable
    monkeypatch.setattr(segment_writer, "create_file", real)
    journal.append_group(group(2), wanted=True)
    durable(journal)
    assert journal.is_durable
    journal.close()
    assert replayed(resumed(tmp_path)) == [(GROUP, 1), (GROUP, 2)]


def test_records_that_are_kept_for_a_retry_are_bounded_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_writer, "MAX_UNSYNCED_BYTES", 10_000)
    journal = resumed(tmp_path)
    for prompt_id in range(40):
        journal.append_group(group(prompt_id, 50), wanted=True)
        begun = journal._segment._queue.soon(lambda: None)
        begun.result(10.0)
        assert sum(map(len, journal._segment._unsynced)) <= 10_000
    journal.close()
    assert len(replayed(resumed(tmp_path))) == 40


def test_restarts_without_a_commit_do_not_accumulate_copies(tmp_path):
    """40 attempts that each add a batch and are killed, from a state that an earlier one began."""
    journal = resumed(tmp_path)
    journal.append_group(group(1000, 50), wanted=True)
    base = begin(journal, 1)
    for number in range(40):
        journal = resumed(tmp_path, base, 1)
        list(journal.again())
        journal.append_group(group(number, 50), wanted=True)
        durable(journal)
    (_, newest) = sorted(tmp_path.iterdir())[-2:]
    others = [path for path in tmp_path.iterdir() if path != newest]
    assert sum(path.stat().st_size for path in others) < newest.stat().st_size
    expected = [(GROUP, number) for number in range(40)]
    assert replayed(resumed(tmp_path, base, 1)) == expected
    # an older checkpoint still finds all records after it
    assert replayed(resumed(tmp_path)) == [(GROUP, 1000), *expected]


def test_a_resume_with_other_settings_deletes_no_records(tmp_path):
    journal = resumed(tmp_path)
    journal.append_group(group(0), wanted=True)
    journal.close()
    held = (tmp_path / "0000000.log").read_bytes()
    resumed(tmp_path, settings="others").close()
    assert (tmp_path / "0000000.log").read_bytes() == held


async def test_one_fsync_covers_all_records_appended_before_it(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file)))
    journal = resumed(tmp_path)
    synced.clear()
    for prompt_id in range(3):
        journal.append_group(group(prompt_id), wanted=True)
    await asyncio.gather(*(journal.durable() for _ in range(3)))
    await journal.durable()
    assert len(synced) == 1


def test_a_new_segment_waits_only_for_records_that_are_not_on_disk_yet(tmp_path, monkeypatch):
    first, synced, real = str(tmp_path / "0000000.log"), [], os.fsync
    journal = resumed(tmp_path)
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), real(file))
    )
    journal.append_group(group(0), wanted=True)
    durable(journal)
    begin(journal, 1)
    assert synced.count(first) == 1
    journal.append_group(group(1), wanted=True)
    begin(journal, 2)
    assert synced.count(str(tmp_path / "0000001.log")) == 1


def test_files_are_private(tmp_path):
    folder = tmp_path / "journal"
    journal = resumed(folder)
    journal.close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "0000000.log").stat().st_mode & 0o777 == 0o600


async def test_a_group_that_finishes_while_a_segment_is_created_is_in_that_segment(
    tmp_path, monkeypatch
):
    """The state was taken earlier and does not contain it."""
    journal, fsync, begun, go_on = resumed(tmp_path), os.fsync, threading.Event(), threading.Event()

    def slow(descriptor):
        begun.set()
        go_on.wait(20)
        fsync(descriptor)

    journal.append_group(group(0), wanted=True)
    monkeypatch.setattr(os, "fsync", slow)
    beginning = asyncio.create_task(journal.begin(1))
    await asyncio.to_thread(begun.wait, 20)
    journal.append_group(group(1), wanted=True)
    go_on.set()
    number = await beginning
    journal.append_group(group(2), wanted=True)
    journal.close()
    assert replayed(resumed(tmp_path, number, 1)) == [(GROUP, 1), (GROUP, 2)]
    assert replayed(resumed(tmp_path)) == [(GROUP, 0), (GROUP, 1), (GROUP, 2)]


async def test_a_segment_on_hanging_storage_stops_the_journal_until_the_next_one_and_not_the_event_loop(
    tmp_path, monkeypatch, caplog
):
    journal, fsync, answers = resumed(tmp_path), os.fsync, threading.Event()
    monkeypatch.setattr("rlpost.durable.segment_writer.DEADLINE_S", 0.2)
    try:
        journal.append_group(group(0), wanted=True)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda descriptor: answers.wait(20) and fsync(descriptor))
            beginning, ticks = asyncio.create_task(journal.begin(1)), 0
            while not beginning.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert ticks > 5 and not journal.is_written
            assert "a new segment took more than 0 s" in caplog.text
            journal.append_group(group(1), wanted=True)
            answers.set()
            await asyncio.sleep(0.1)
        assert not journal.is_written, "what comes back late changes nothing"
        number = await journal.begin(2)
        assert journal.is_written
        journal.append_group(group(2), wanted=True)
    finally:
        answers.set()
    journal.close()
    assert replayed(resumed(tmp_path, number, 2)) == [(GROUP, 2)]
