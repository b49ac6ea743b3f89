"""Only records that provably follow are used, for any history of a run and any damaged file."""

import errno
import io
import json
import os
import shutil
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.durable import journal_format, journal_segments, segment_writer
from rlpost.durable.journal_chain import follow, read_folder
from rlpost.durable.journal_format import (
    BATCH,
    FORMAT,
    GROUP,
    HEADER,
    Framing,
)
from rlpost.durable.journal_segments import read_segment
from rlpost.durable.run_files import RETRY_AFTER_S
from rlpost.errors import CheckpointError, ConfigError
from tests.unit.durable.test_journal import begin, durable, group, resumed

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["group", "group", "batch", "again", "begin", "crash", "compact"]),
        st.integers(0, 3),
    ),
    min_size=10,
    max_size=50,
)
DAMAGE = ["flip", "cut", "empty", "delete", "duplicate", "swap"]


class Life:
    """A run with crashes; ``states`` has each state with the events to be replayed after it."""

    def __init__(self, folder):
        self.folder, self.num_groups, self.step, self.in_training = folder, 0, 0, None
        self.states = [(0, 0, [])]  # segment, step, events
        self.journal = resumed(folder)

    def again(self, _=0):
        for record in self.journal.again():
            if record.kind == BATCH:
                self.step, self.in_training = self.step + 1, (BATCH, record.meta["prompt_ids"])

    def drain(self):
        while self.journal.waiting:
            self.again()

    def happened(self, event):
        for _, _, events in self.states:
            events.append(event)

    def group(self, _):
        self.drain()
        self.journal.append_group(group(self.num_groups, 2), wanted=True)
        self.happened((GROUP, self.num_groups))
        self.num_groups += 1

    def batch(self, _):
        self.drain()
        self.journal.batch(self.step, [group(self.num_groups - 1)], {})
        self.step, self.in_training = self.step + 1, (BATCH, [self.num_groups - 1])
        self.happened(self.in_training)

    def begin(self, choice):
        """Save a state, sometimes while the newest batch is not trained yet."""
        if choice:
            self.in_training = None  # the newest batch is trained
        owed = [] if self.in_training is None else [self.in_training]
        step, events = self.step - len(owed), owed + waiting(self.journal)
        self.states.append((begin(self.journal, step), step, events))

    def crash(self, choice):
        """Crash and resume, sometimes from the second newest state.

        The newest one may not have been committed, or may be damaged.
        """
        self.journal.close()
        if choice == 0 and len(self.states) > 1:
            self.states.pop()
        base, self.step, events = self.states[-1]
        self.in_training = None
        self.journal = resumed(self.folder, base, self.step)
        assert waiting(self.journal) == events

    def compact(self, _):
        self.states = self.states[-2:]
        self.journal.compact(self.states[0][1])


def event_of(record):
    return record.kind, record.meta["prompt_id" if record.kind == GROUP else "prompt_ids"]


def waiting(journal):
    return [event_of(record) for record in journal.waiting]


def damage(folder, kind, number, at):
    paths = sorted(folder.glob("*.log"))
    path = paths[number % len(paths)]
    data = bytearray(path.read_bytes() or b"\0")
    if kind == "flip":
        data[at % len(data)] ^= 1 << at % 8
        path.write_bytes(bytes(data))
    elif kind in ("cut", "empty"):
        path.write_bytes(bytes(data[: at % len(data) if kind == "cut" else 0]))
    elif kind == "delete":
        path.unlink()
    elif kind == "duplicate":
        shutil.copy(path, folder / f"{int(paths[-1].stem) + 1 + at % 2:07d}.log")
    else:
        other = paths[at % len(paths)]
        theirs = other.read_bytes()
        other.write_bytes(bytes(data))
        path.write_bytes(theirs)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.sampled_from(DAMAGE), st.integers(0, 99), st.integers(0, 9999))
def test_the_used_records_are_a_prefix_of_what_happened(
    tmp_path_factory, operations, kind, number, at
):
    folder = tmp_path_factory.mktemp("life")
    life = Life(folder)
    for name, choice in operations:
        getattr(life, name)(choice)
    life.journal.close()
    for base, step, events in life.states[-2:]:
        found = follow(read_folder(folder)[0], base, step)
        assert [event_of(record) for record in found.records] == events
        assert found.problems == ()
    damage(folder, kind, number, at)
    for base, step, events in life.states[-2:]:
        copy = shutil.copytree(folder, folder.with_name(f"{folder.name}-{base}"))
        journal = resumed(copy, base, step)
        used = waiting(journal)
        assert used == events[: len(used)]
        for record in journal.waiting:
            if record.kind == GROUP:
                assert record.group() == group(record.meta["prompt_id"], 2)
        # the run continues from here, even after another crash
        journal.append_group(group(10**6, 1), wanted=True)
        journal.close()
        assert waiting(resumed(copy, base, step)) == [*used, (GROUP, 10**6)]


def four_segments(folder):
    """Write a journal of uncommitted states with one group and one batch per segment."""
    journal = resumed(folder)
    for step in range(4):
        journal.append_group(group(step, 3), wanted=True)
        journal.batch(step, [group(step)], {})
        if step < 3:
            begin(journal, step + 1)
    journal.close()
    return [(kind, event) for step in range(4) for kind, event in ((GROUP, step), (BATCH, [step]))]


@pytest.mark.parametrize("written", [None, 1, 2])
def test_a_segment_of_an_earlier_format_is_refused_with_the_version_that_resumes_it(
    tmp_path, written
):
    four_segments(tmp_path)
    in_format(written, tmp_path / "0000002.log")
    with pytest.raises(ConfigError, match=r"0000002\.log: it has format .*rlpost 0\.2\.0 until"):
        resumed(tmp_path)
    newest = max(segment.header.base for segment in read_folder(tmp_path)[0])
    assert newest == 3
    resumed(tmp_path, 3, 3).close()  # the state of a later segment does not need it


def in_format(written, path):
    """Write the header of a segment alone, in an earlier format; the first one had no number."""
    header = asdict(read_segment(path).header) | {"format": written}
    if written is None:
        del header["format"], header["previous"], header["data"]
    path.write_bytes(Framing().frame(bytes([HEADER]) + json.dumps(header).encode()))


def test_a_record_is_valid_only_in_its_place(tmp_path):
    """Both records keep their lengths and checksums; only their order is changed."""
    journal = resumed(tmp_path)
    for prompt_id in range(3):
        journal.append_group(group(prompt_id, 4), wanted=True)
    journal.close()
    path = tmp_path / "0000000.log"
    data = path.read_bytes()
    first, second, third = (
        (each.offset, each.offset + each.size) for each in read_segment(path).records
    )
    path.write_bytes(
        data[: first[0]] + data[slice(*second)] + data[slice(*first)] + data[slice(*third)]
    )
    assert waiting(resumed(tmp_path)) == []


def test_a_segment_of_a_newer_version_is_named_and_not_used(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr("rlpost.durable.journal_reads.FORMAT", FORMAT + 1)
        four_segments(tmp_path)
    assert waiting(resumed(tmp_path)) == []
    assert "0000000.log: it was written by a newer version" in caplog.text


def test_with_other_prompt_data_nothing_is_used_and_the_cost_is_reported(tmp_path, caplog):
    journal = resumed(tmp_path, data="11 rows")
    journal.append_group(group(0, 3, 4), wanted=True)
    journal.close()
    assert waiting(resumed(tmp_path, data="11 rows")) == [(GROUP, 0)]
    assert caplog.text == ""
    assert waiting(resumed(tmp_path, data="13 rows")) == []
    assert (
        "0000001.log: the files of --prompt-data have changed since; it is not used" in caplog.text
    )
    assert "groups: 1 (7 tokens)" in caplog.text
    assert waiting(resumed(tmp_path, data="13 rows")) == []


@pytest.mark.parametrize(
    ("attempts", "is_used"),
    [
        (["files", "files+images", "files+images"], True),
        (["files", "others+images"], False),
        (["files", "files+images", "files+others"], False),
        (["files+images", "files"], False),
    ],
)
def test_a_fingerprint_without_images_is_compared_with_that_of_the_files(
    tmp_path, caplog, attempts, is_used
):
    """Segments of rlpost 0.2 have it, and one with images continues them."""
    journal = resumed(tmp_path, data=attempts[0])
    journal.append_group(group(0, 3, 4), wanted=True)
    for data in attempts[1:]:
        journal.close()
        journal = resumed(tmp_path, data=data)
    assert waiting(journal) == ([(GROUP, 0)] if is_used else [])
    of_images = attempts[1:] == ["files+images", "files+others"]
    what = "images that the rows" if of_images else "the files"
    assert ("have changed since" in caplog.text) != is_used
    assert is_used or f"{what} of --prompt-data" in caplog.text
    journal.close()


# Storage that fails when it is read.


class Failing(io.BufferedReader):
    """A reader of a file whose reads beyond ``offset`` fail."""

    def __init__(self, path, offset, error):
        super().__init__(io.FileIO(path))
        self.offset, self.error = offset, error

    def read(self, size=-1):
        if self.tell() + size > self.offset:
            raise OSError(self.error, os.strerror(self.error))
        return super().read(size)


@pytest.fixture
def failing(monkeypatch):
    """Make reads of a file fail from an offset on, for a number of opens or always."""

    def fail(path, offset, error=errno.EIO, times=10**9):
        left = [times]

        def opened(given, mode="r"):
            if str(given) == str(path) and left[0] > 0:
                left[0] -= 1
                return Failing(given, offset, error)
            return open(given, mode)

        for module in (journal_format, journal_segments):
            monkeypatch.setattr(module, "open", opened, raising=False)

    return fail


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between retries, which take no time."""
    seconds = []
    monkeypatch.setattr("rlpost.durable.run_files.time.sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_read_that_fails_for_a_moment_is_repeated(
    tmp_path, failing, error, times, caplog, pauses
):
    events = four_segments(tmp_path)
    failing(tmp_path / "0000001.log", 0, error, times=times)
    assert waiting(resumed(tmp_path)) == events
    assert caplog.text == ""


@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("where", ["header", "last record"])
def test_a_segment_that_cannot_be_read_ends_the_attempt_and_is_not_taken_for_damaged(
    tmp_path, failing, number, where, pauses, monkeypatch
):
    """The next attempt finds all records, whatever the first one did in between."""
    events = four_segments(tmp_path)
    path = tmp_path / f"{number:07d}.log"
    failing(path, 0 if where == "header" else read_segment(path).records[-1].offset)
    with pytest.raises(CheckpointError, match=f"{path} cannot be read: .*Input/output error"):
        resumed(tmp_path)
    assert pauses == list(RETRY_AFTER_S)
    for module in (journal_format, journal_segments):
        monkeypatch.setattr(module, "open", open, raising=False)
    assert waiting(resumed(tmp_path)) == events


def test_no_segment_is_deleted_while_a_header_cannot_be_read(tmp_path, failing, pauses, caplog):
    """The oldest state that is kept may begin with that segment."""
    four_segments(tmp_path)
    journal = resumed(tmp_path)
    files = sorted(tmp_path.glob("*.log"))
    failing(files[0], 0)
    journal.compact(1)
    assert sorted(tmp_path.glob("*.log")) == files
    assert "old segments in" in caplog.text and "not deleted yet" in caplog.text


def test_a_record_that_becomes_unreadable_ends_the_attempt_with_a_message_and_the_next_one_resumes(
    tmp_path, failing, pauses, monkeypatch
):
    events = four_segments(tmp_path)
    journal = resumed(tmp_path)
    path = tmp_path / "0000004.log"
    failing(path, journal.waiting[2].offset)
    assert [record.key for record in journal.again()] == [(GROUP, 0), (BATCH, 0)]
    with pytest.raises(
        CheckpointError, match=r"0000004\.log: the record at byte \d+ cannot be read: .*requeue"
    ):
        [record.group() for record in journal.again()]
    journal.close()
    for module in (journal_format, journal_segments):
        monkeypatch.setattr(module, "open", open, raising=False)
    assert waiting(resumed(tmp_path)) == events


def test_a_record_damaged_since_startup_is_not_used(tmp_path):
    four_segments(tmp_path)
    journal = resumed(tmp_path)
    path = tmp_path / "0000004.log"
    data = bytearray(path.read_bytes())
    data[journal.waiting[0].offset + 20] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="damaged now; the next attempt"):
        next(journal.again()).group()


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch, pauses):
    def stale(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(journal_segments.os, "listdir", stale)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*[Ss]tale"):
        resumed(tmp_path)


# File systems without hard links, and file systems that lose replies.


def test_a_link_that_succeeded_despite_an_error_that_the_file_exists_is_recognised(
    tmp_path, monkeypatch
):
    """NFS repeats a request whose reply was lost, although the server has carried it out."""
    real = os.link

    def repeated(source, target):
        real(source, target)
        raise FileExistsError(
            errno.EEXIST, os.strerror(errno.EEXIST), str(source), None, str(target)
        )

    with monkeypatch.context() as patched:
        patched.setattr(segment_writer.os, "link", repeated)
        journal = resumed(tmp_path)
        journal.append_group(group(0), wanted=True)
        begin(journal, 1)
        journal.append_group(group(1), wanted=True)
        journal.close()
    assert waiting(resumed(tmp_path)) == [(GROUP, 0), (GROUP, 1)]


def no_hard_links(source, target):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source), None, str(target))


def test_without_hard_links_a_segment_is_still_whole_and_never_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_writer.os, "link", no_hard_links)
    old = resumed(tmp_path)
    old.append_group(group(0), wanted=True)
    durable(old)
    new = resumed(tmp_path)
    new.append_group(group(1), wanted=True)
    durable(new)
    content = (tmp_path / "0000001.log").read_bytes()
    assert begin(old, 1) == 2
    new.close()
    assert (tmp_path / "0000001.log").read_bytes() == content
    assert waiting(resumed(tmp_path)) == [(GROUP, 0), (GROUP, 1)]
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_without_hard_links_a_crash_between_name_and_content_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_writer.os, "link", no_hard_links)
    journal = resumed(tmp_path)
    journal.append_group(group(0), wanted=True)

    def crash(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(segment_writer.os, "replace", crash)
        begin(journal, 1)
    assert (tmp_path / "0000001.log").stat().st_size == 0
    assert waiting(resumed(tmp_path)) == [(GROUP, 0)]


def test_temporary_files_have_names_unique_to_their_process(tmp_path, monkeypatch):
    """Hosts of a shared file system may have equal process ids."""
    names, real = [], os.link
    monkeypatch.setattr(
        segment_writer.os, "link", lambda a, b: (names.append(os.path.basename(a)), real(a, b))
    )
    for host in ("first/host", "second", "second"):
        monkeypatch.setattr(segment_writer.socket, "gethostname", lambda host=host: host)
        resumed(tmp_path / str(len(names))).close()
    assert len(set(names)) == 3
    assert all(str(os.getpid()) in name for name in names)
    assert "first-host" in names[0] and "second" in names[1]


def test_the_folder_itself_survives_a_power_loss(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def spied(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", spied)
    resumed(tmp_path / "save/journal").close()
    assert str(tmp_path / "save") in synced
    assert synced.index(str(tmp_path / "save")) < synced.index(str(tmp_path / "save/journal"))


def test_compaction_removes_damaged_segments_too(tmp_path):
    journal = resumed(tmp_path)
    begin(journal, 10)
    (tmp_path / "0000000.log").write_bytes(b"")
    begin(journal, 20)
    journal.compact(20)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0000002.log"]


def test_a_segment_resumed_from_a_kept_checkpoint_is_kept_although_its_base_is_damaged(tmp_path):
    journal = resumed(tmp_path)
    number = begin(journal, 10)
    journal.append_group(group(0), wanted=True)
    journal.close()
    journal = resumed(tmp_path, number, 10)
    (tmp_path / f"{number:07d}.log").write_bytes(b"")
    begin(journal, 20)
    journal.compact(10)
    journal.close()
    assert waiting(resumed(tmp_path, number, 10)) == [(GROUP, 0)]
