"""A run keeps its identity where it is moved; a copy and a second run have others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from common import run_identity
from common.run_identity import (
    IDENTITY_FILE,
    copy_words,
    original_of,
    read_identity,
    settle_identity,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "läufe 1"
    folder.mkdir()
    return folder


def test_a_run_has_one_identity_and_a_later_run_of_the_same_name_another(run: Path) -> None:
    assert read_identity(run) is None
    identity = settle_identity(run)
    assert settle_identity(run) == read_identity(run) == identity
    assert identity.label == f"l-ufe-1-{identity.id[:8]}"
    shutil.rmtree(run)
    run.mkdir()
    assert settle_identity(run).label != identity.label


@pytest.mark.parametrize("across", [False, True], ids=["renamed", "to another file system"])
def test_a_moved_folder_keeps_its_identity(run: Path, across: bool) -> None:
    identity, moved = settle_identity(run), run.with_name("moved")
    if across:
        shutil.copytree(run, moved)
        shutil.rmtree(run)
    else:
        run.rename(moved)
    run.mkdir()  # its old place is taken by a new run
    settle_identity(run)
    assert original_of(moved) is None
    assert settle_identity(moved).id == identity.id == read_identity(moved).id
    assert settle_identity(moved).path == str(moved)


def test_a_copy_gets_a_new_identity_once_and_its_original_keeps_its_own(run: Path) -> None:
    identity, copy = settle_identity(run), run.with_name("branch")
    shutil.copytree(run, copy)
    assert original_of(copy) == run and read_identity(copy) is None
    assert str(run) in copy_words(copy, run)
    settled = settle_identity(copy)
    assert settled.id != identity.id and settled.label.startswith("branch-")
    assert settle_identity(copy) == settled and original_of(copy) is None
    assert settle_identity(run) == identity
    shutil.copytree(copy, run.with_name("branch of the branch"))
    assert original_of(run.with_name("branch of the branch")) == copy


@pytest.mark.parametrize("first", ["moved", "copy"], ids="{} is resumed first".format)
@pytest.mark.parametrize("across", [False, True], ids=["renamed", "to another file system"])
def test_of_a_moved_run_and_its_copy_one_has_the_identity(
    run: Path, across: bool, first: str
) -> None:
    identity = settle_identity(run)
    moved, copy = run.with_name("moved"), run.with_name("copy")
    if across:
        shutil.copytree(run, moved)
        shutil.copytree(run, copy)
        shutil.rmtree(run)
    else:
        run.rename(moved)
        shutil.copytree(moved, copy)
    settled = {}
    for name in dict.fromkeys((first, "moved", "copy")):
        settled[name] = settle_identity(run.with_name(name))
    assert [each.id for each in settled.values()].count(identity.id) == 1
    assert across or settled["moved"].id == identity.id
    for name, each in settled.items():
        assert settle_identity(run.with_name(name)) == each


def test_a_place_that_cannot_be_looked_into_is_no_original(run: Path, monkeypatch) -> None:
    identity, moved = settle_identity(run), run.with_name("moved")
    run.rename(moved)

    def refuse(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.path.samefile", refuse)
    assert settle_identity(moved).id == identity.id


def test_a_run_of_another_user_is_an_original(run: Path, monkeypatch) -> None:
    settle_identity(run)
    copy, read = shutil.copytree(run, run.with_name("copy")), run_identity.read_regular

    def refuse(path: Path) -> bytes:
        if path == run / IDENTITY_FILE:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(run_identity, "read_regular", refuse)
    assert original_of(copy) == run


def test_a_link_to_a_run_is_the_run(run: Path) -> None:
    identity, link = settle_identity(run), run.with_name("latest")
    link.symlink_to(run)
    assert original_of(link) is None and settle_identity(link) == identity


def test_ids_of_runs_from_before_are_kept(run: Path) -> None:
    (run / "wandb").mkdir()
    (run / "wandb/run_id").write_text("tiny-12345678\n")
    (run / "export_id").write_text("0123456789abcdef\n")
    identity = settle_identity(run)
    assert (identity.id, identity.label) == ("0123456789abcdef", "tiny-12345678")
    shutil.copytree(run, run.with_name("copy"))
    assert settle_identity(run.with_name("copy")).id != identity.id


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"id": "a"}'])
def test_a_damaged_file_is_replaced(run: Path, text: str) -> None:
    (run / IDENTITY_FILE).write_text(text)
    assert read_identity(run) is None
    assert settle_identity(run) == read_identity(run)


def test_a_fifo_among_the_runs_blocks_no_command(run: Path) -> None:
    settle_identity(run)
    moved, other = run.with_name("moved"), run.with_name("another user's")
    shutil.copytree(run, moved)
    shutil.rmtree(run)
    other.mkdir()
    os.mkfifo(other / IDENTITY_FILE)
    assert original_of(moved) is None
    with pytest.raises(OSError, match="not a regular file"):
        read_identity(other)
