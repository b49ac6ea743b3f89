"""The commit protocol against crashes at every file operation, damaged files and leftovers."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from common import files
from rlpost.durable import commit as protocol
from rlpost.durable.commit import (
    begin,
    checkpoint_name,
    commit,
    discard,
    newest_committed,
    prune,
    step_of,
)
from rlpost.errors import CheckpointError


def write(folder: Path, step: int, content: str) -> Path:
    """The whole of a save: begin, some files in two folders, commit."""
    writing = begin(folder, step)
    (writing / "megatron").mkdir()
    (writing / "megatron" / "__0_0.distcp").write_bytes(content.encode() * 1000)
    (writing / "state.json").write_text(content)
    return commit(writing)


def content_of(folder: Path) -> tuple[int, str] | None:
    path = newest_committed(folder).path
    return None if path is None else (step_of(path), (path / "state.json").read_text())


class Crash(BaseException):
    """Stands for the end of the process: nothing in the code under test may catch it."""


class CrashAt:
    """Lets ``number`` file operations of the commit protocol happen and ends the process at the
    next one.
    """

    OPERATIONS = ("mkdir", "makedirs", "open", "rename", "replace", "fsync")

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = number
        fake_os = type(os)("os")
        fake_os.__dict__.update(os.__dict__)
        for name in self.OPERATIONS:
            setattr(fake_os, name, self.counted(getattr(os, name)))
        fake_shutil = type(shutil)("shutil")
        fake_shutil.rmtree = self.half_removed
        monkeypatch.setattr(protocol, "shutil", fake_shutil)
        for module in (protocol, files):
            monkeypatch.setattr(module, "os", fake_os)
            monkeypatch.setattr(module, "open", self.opened, raising=False)

    def counted(self, operation: Callable) -> Callable:
        def run(*args, **kwargs):
            self.tick()
            return operation(*args, **kwargs)

        return run

    def opened(self, path, mode="r"):
        if "w" in mode:
            self.tick()
        return builtins.open(path, mode)

    def half_removed(self, path: Path) -> None:
        """rmtree is not atomic: a crash may leave some of the files."""
        for file in sorted(path.rglob("*")):
            if file.is_file():
                self.tick()
                file.unlink()
        self.tick()
        shutil.rmtree(path)

    def tick(self) -> None:
        if self.left == 0:
            raise Crash
        self.left -= 1


@pytest.fixture(autouse=True)
def _no_power_is_cut(monkeypatch):
    """A process that ends loses nothing that it wrote: where an fsync stands is tested, and not
    what it takes.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save_and_prune(folder: Path, step: int, content: str) -> None:
    write(folder, step, content)
    prune(folder, keep_last=1)


def crashes(folder: Path, step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Save ``step`` with content "new"; False when it has no file operation of that number to crash
    at.
    """
    with monkeypatch.context() as patch:
        CrashAt(number, patch)
        try:
            save_and_prune(folder, step, "new")
        except Crash:
            return True
    return False


def crash_everywhere(
    root: Path, *, before: list[tuple[int, str]], step: int, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Save ``step`` with content "new" and crash at each file operation in turn; returns how many
    there were.
    """
    allowed = {before[-1], (step, "new")}
    for number in range(1000):
        folder = root / f"crash_{number}"
        for old_step, old_content in before:
            write(folder, old_step, old_content)
        crashed = crashes(folder, step, number, monkeypatch)
        assert content_of(folder) in allowed, f"after a crash at file operation {number}"
        save_and_prune(folder, step, "new")
        assert content_of(folder) == (step, "new"), (
            f"when saving again after a crash at file operation {number}"
        )
        assert sorted(path.name for path in folder.iterdir()) == [
            protocol.checkpoint_name(step),
            "latest",
        ]
        if not crashed:
            return number
    raise AssertionError("the save never came to its end")


def test_a_crash_at_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    before = [(10, "ten"), (15, "fifteen")]
    assert crash_everywhere(tmp_path, before=before, step=20, monkeypatch=monkeypatch) > 20


def test_a_crash_while_a_step_is_saved_again_never_loses_that_step(tmp_path, monkeypatch):
    before = [(10, "ten"), (20, "old")]
    assert crash_everywhere(tmp_path, before=before, step=20, monkeypatch=monkeypatch) > 20


@pytest.mark.slow
def test_a_second_crash_during_the_recovery_of_the_first_is_survived_too(tmp_path, monkeypatch):
    for first in range(0, 40, 3):
        once = tmp_path / f"{first}"
        write(once, 20, "old")
        if not crashes(once, 20, first, monkeypatch):
            break
        for second in range(0, 60, 3):
            twice = tmp_path / f"{first}_{second}"
            shutil.copytree(once, twice)
            crashed = crashes(twice, 20, second, monkeypatch)
            assert content_of(twice) in {(20, "old"), (20, "new")}
            if not crashed:
                break
        else:
            raise AssertionError("the save after a crash never came to its end")
    else:
        raise AssertionError("the save never came to its end")


def test_nothing_is_found_in_a_folder_that_does_not_exist(tmp_path):
    assert newest_committed(tmp_path / "none") == protocol.Search(None, ())


def test_without_checksums_only_sizes_are_compared(tmp_path):
    path = write(tmp_path, 20, "twenty")
    (path / "state.json").write_text("twentY")
    assert newest_committed(tmp_path).path is None
    assert newest_committed(tmp_path, checksums=False).path == path


def test_prune_keeps_the_newest_complete_checkpoints_and_ignores_broken_ones(tmp_path):
    for step in (5, 10, 15, 20, 25):
        write(tmp_path, step, str(step))
    (tmp_path / checkpoint_name(20) / protocol.COMMITTED).unlink()
    begin(tmp_path, 30)
    prune(tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        checkpoint_name(15),
        checkpoint_name(20),
        checkpoint_name(25),
        "latest",
    ]
    assert (tmp_path / "latest").read_text() == "iter_0000025\n"


def test_prune_deletes_nothing_when_no_checkpoint_is_complete(tmp_path):
    path = write(tmp_path, 5, "five")
    (path / protocol.COMMITTED).unlink()
    assert prune(tmp_path, keep_last=1) == ()
    assert path.is_dir()


def test_an_empty_checkpoint_cannot_be_committed(tmp_path):
    with pytest.raises(CheckpointError, match="is empty"):
        commit(begin(tmp_path, 1))


def test_folders_are_open_to_their_owner_only(tmp_path):
    path = write(tmp_path / "checkpoints", 1, "one")
    assert [oct(p.stat().st_mode & 0o777) for p in (path, path.parent)] == ["0o700", "0o700"]


def test_a_checkpoint_of_another_program_is_never_replaced(tmp_path):
    """Megatron-LM names its folders iter_0000020 as well: --save may be where another trainer
    saved.
    """
    write(tmp_path, 10, "ten")
    theirs = tmp_path / protocol.checkpoint_name(20)
    theirs.mkdir()
    (theirs / "__0_0.distcp").write_text("weeks of training")
    with pytest.raises(CheckpointError, match="was not written by rlpost"):
        write(tmp_path, 20, "ours")
    discard(tmp_path / f"{protocol.WRITING}{theirs.name}")
    assert (theirs / "__0_0.distcp").read_text() == "weeks of training"
    assert content_of(tmp_path) == (10, "ten")


def test_discarding_a_save_that_failed_after_its_commit_keeps_the_checkpoint(tmp_path):
    path = write(tmp_path, 10, "ten")
    discard(tmp_path / f"{protocol.WRITING}{path.name}")
    assert content_of(tmp_path) == (10, "ten")


@pytest.mark.parametrize("keep_every", [None, 10])
def test_prune_never_deletes_the_checkpoint_that_was_just_committed(tmp_path, keep_every):
    """A damaged one of a higher step, of the right sizes: the resume went back behind it, and its
    step is to come.
    """
    write(tmp_path, 10, "ten")
    damaged = write(tmp_path, 20, "twenty")
    (damaged / "state.json").write_text("twentY")
    path = write(tmp_path, 15, "fifteen")
    prune(tmp_path, 1, keep_every=keep_every, committed=path)
    assert newest_committed(tmp_path).path == path and damaged.is_dir()
    assert protocol.recoverable(tmp_path, 1, committed=path) == [path]
    assert (tmp_path / checkpoint_name(10)).exists() == (keep_every is not None)
    path = write(tmp_path, 20, "again")
    prune(tmp_path, 1, committed=path)
    assert content_of(tmp_path) == (20, "again") and not (tmp_path / checkpoint_name(15)).exists()


def test_a_checkpoint_is_committed_even_if_latest_cannot_be_written(tmp_path, caplog):
    (tmp_path / "latest").mkdir()
    assert newest_committed(tmp_path).path is None
    path = write(tmp_path, 20, "twenty")
    assert newest_committed(tmp_path).path == path
    assert "latest does not name it" in caplog.text


def test_a_file_system_that_refuses_to_sync_folders_can_hold_checkpoints(tmp_path, monkeypatch):
    def refuses(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuses)
    assert newest_committed(tmp_path).path is None
    assert write(tmp_path, 20, "twenty") == newest_committed(tmp_path).path
