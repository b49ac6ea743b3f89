"""The model of what a power loss leaves, and the interception of file operations."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash_consistency.hooks import FaultAt, KillAt
from tests.crash_consistency.interception import Attempt, Disk, Killed, intercepted


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    root = tmp_path / "run"
    (root / "folder").mkdir(parents=True)
    (root / "old").write_bytes(b"old")
    with intercepted():
        yield Disk(root)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def after(disk: Disk, act: Callable[[Path], object], variant: str) -> dict[str, bytes]:
    """Return the files after a power loss."""
    with Attempt(disk, 0).active():
        act(disk.root)
    assert disk.model.differences() == []
    disk.model.lose_power(variant, random.Random(0))
    return {
        str(path.relative_to(disk.root)): path.read_bytes()
        for path in disk.root.rglob("*")
        if path.is_file()
    }


def new_file(root: Path) -> None:
    (root / "new").write_bytes(b"new")


@pytest.mark.parametrize(("variant", "left"), [("strict", None), ("data", None), ("names", b"")])
def test_changes_without_an_fsync_are_lost(disk: Disk, variant: str, left: bytes | None) -> None:
    found = after(disk, new_file, variant)
    assert found.pop("old") == b"old"
    assert found == ({} if left is None else {"new": left})


def test_the_last_write_of_a_file_may_be_torn(disk: Disk) -> None:
    def append(root: Path) -> None:
        with open(root / "old", "ab") as file:
            file.write(bytes(1000))

    assert 3 <= len(after(disk, append, "torn")["old"]) < 1003


@pytest.mark.parametrize(("variant", "left"), [("strict", b"old"), ("data", b"old and new")])
def test_data_alone_may_survive(disk: Disk, variant: str, left: bytes) -> None:
    def append(root: Path) -> None:
        with open(root / "old", "a") as file:
            file.write(" and new")

    assert after(disk, append, variant)["old"] == left


def test_a_file_needs_the_fsync_of_its_folder_too(disk: Disk) -> None:
    assert "new" not in after(disk, lambda root: (new_file(root), sync(root / "new")), "strict")


@pytest.mark.parametrize("variant", ["strict", "names", "data", "random", "torn"])
def test_changes_covered_by_an_fsync_survive(disk: Disk, variant: str) -> None:
    found = after(disk, lambda root: (new_file(root), sync(root / "new"), sync(root)), variant)
    assert found == {"old": b"old", "new": b"new"}


def test_a_rename_is_durable_with_the_folder_that_receives_the_name(disk: Disk) -> None:
    def move(root: Path) -> None:
        os.rename(root / "old", root / "folder" / "moved")
        sync(root)

    assert after(disk, move, "strict") == {"old": b"old"}
    with Attempt(disk, 0).active():
        move(disk.root)
        sync(disk.root / "folder")
    disk.model.lose_power("strict", random.Random(0))
    assert (disk.root / "folder" / "moved").read_bytes() == b"old"
    assert not (disk.root / "old").exists()


def test_a_reused_name_is_not_undone_by_an_earlier_change(disk: Disk) -> None:
    def act(root: Path) -> None:
        new_file(root)
        sync(root / "new")
        os.rename(root / "new", root / "folder" / "new")
        sync(root / "folder")
        sync(root)

    assert after(disk, act, "strict") == {"old": b"old", "folder/new": b"new"}


def test_paths_relative_to_a_descriptor_are_intercepted(disk: Disk) -> None:
    def act(root: Path) -> None:
        folder = os.open(root / "folder", os.O_RDONLY | os.O_DIRECTORY)
        os.rename(root / "folder", root / "elsewhere")
        file = os.open("inner", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder)
        os.write(file, b"text")
        os.fsync(file)
        os.close(file)
        os.rename("inner", "final", src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
        os.close(folder)
        with open(
            "last", "w", opener=lambda path, flags: os.open(root / "elsewhere" / path, flags)
        ) as text:
            text.write("more")

    found = after(disk, lambda root: (act(root), sync(root)), "strict")
    assert found == {"old": b"old", "elsewhere/final": b"text"}


def test_a_killed_process_changes_nothing_more(disk: Disk) -> None:
    def act(root: Path) -> None:
        with open(root / "new", "w") as file:
            try:
                file.write("text")
                file.flush()
                os.rename(root / "old", root / "older")
            finally:
                file.write("more")
                shutil.rmtree(root / "folder")

    attempt = Attempt(disk, 0, [KillAt(2)])
    with attempt.active(), pytest.raises(Killed):
        act(disk.root)
    assert (disk.root / "new").read_text() == "text"
    assert (disk.root / "folder").is_dir() and (disk.root / "old").exists()


def test_a_short_write_writes_half_and_a_torn_one_ends_the_process_there(disk: Disk) -> None:
    def act(root: Path) -> int:
        file = os.open(root / "new", os.O_WRONLY | os.O_CREAT, 0o600)
        return os.write(file, b"12345678")

    short = FaultAt(0, "short", 1, lambda op: op.kind == "write")
    with Attempt(disk, 0, [short]).active():
        assert act(disk.root) == 4
    torn = KillAt(0, torn=True, matches=lambda op: op.kind == "write")
    with Attempt(disk, 1, [torn]).active(), pytest.raises(Killed):
        act(disk.root)
    assert (disk.root / "new").read_bytes() == b"1234"
    assert disk.model.differences() == []


def test_a_failed_operation_changes_nothing(disk: Disk) -> None:
    with Attempt(disk, 0, [FaultAt(0, "ENOSPC", 1, lambda op: op.kind == "create")]).active():
        with pytest.raises(OSError, match="No space left"):
            new_file(disk.root)
        new_file(disk.root)
    assert disk.model.differences() == []
