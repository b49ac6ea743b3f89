"""Invariant: of several writers the first wins, and no reader sees a partial file."""

import errno
import os
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.files import (
    OutsideFolder,
    below,
    check_path,
    full_words,
    read_object,
    read_regular,
    tail,
    text_or_empty,
    write_atomic,
    write_first,
)


def test_a_path_of_others_stays_below_its_folder_links_included(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    for name, target in (("in", "a"), ("up", ".."), ("far", "/etc"), ("loop", "loop")):
        (root / name).symlink_to(target)
    (tmp_path / "link").symlink_to(root)
    for path in (".", "a", "in", "in/new", "a/../a", "new/deep", "loop"):
        assert below(root, path) == root / path
        assert below(tmp_path / "link", path)
    for path in ("..", "up", "up/root2", "far", "far/passwd", "/etc", "a/../../x", "in/../../x"):
        with pytest.raises(OutsideFolder, match="is not below"):
            below(root, path)
    for path in ("/etc", "../x", "a/../../x", "a//b", "", "a\0", "."):
        with pytest.raises(ValueError, match="must be relative"):
            check_path(path)


def test_the_first_writer_wins(tmp_path: Path) -> None:
    target = tmp_path / "STOP"
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: write_first(target, str(number)), range(32)))
    assert won.count(True) == 1
    assert target.read_text() == str(won.index(True))
    assert list(tmp_path.iterdir()) == [target]


def test_a_later_text_replaces_an_earlier_one(tmp_path: Path) -> None:
    write_atomic(tmp_path / "verdict", "failed")
    write_atomic(tmp_path / "verdict", "done")
    assert (tmp_path / "verdict").read_text() == "done"


def test_a_text_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os,
            "fsync",
            lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")),
        )
        write_atomic(tmp_path / "verdict", "done")
    assert list(tmp_path.iterdir()) == []


def test_the_tail_of_a_log_and_of_none(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(map(str, range(100))))
    assert tail(tmp_path / "log", 2) == "98\n99"
    assert "cannot be read" in tail(tmp_path / "none")


def test_a_link_that_is_answered_twice_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: the reply was lost, the client retried, and its own link exists already."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert write_first(tmp_path / "STOP", "first")
    assert not write_first(tmp_path / "STOP", "second")
    assert (tmp_path / "STOP").read_text() == "first" and [
        path.name for path in tmp_path.iterdir()
    ] == ["STOP"]


def test_the_first_wins_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    assert write_first(tmp_path / "STOP", "first") and not write_first(tmp_path / "STOP", "second")
    assert (tmp_path / "STOP").read_text() == "first" and [
        path.name for path in tmp_path.iterdir()
    ] == ["STOP"]


def test_a_file_is_replaced_as_a_whole_or_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, ["one\n", "two\n"])
    assert path.read_text() == "one\ntwo\n"

    def broken():
        yield "half"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_atomic(path, broken())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            write_atomic(path, ["three"])
    assert [entry.name for entry in tmp_path.iterdir()] == [
        "file"
    ] and path.read_text() == "one\ntwo\n"


def test_a_temporary_name_that_a_crash_left_is_used_again(tmp_path: Path) -> None:
    through = tmp_path / "lane"
    through.write_text("half of an earlier text that was longer")
    write_atomic(tmp_path / "file", "whole", mode=0o640, through=through)
    assert (tmp_path / "file").read_text() == "whole" and list(tmp_path.iterdir()) == [
        tmp_path / "file"
    ]


def test_readers_other_than_the_owner_need_a_mode(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        write_atomic(tmp_path / "secret", "x")
        write_atomic(tmp_path / "shared", "x", mode=0o666)
    finally:
        os.umask(umask)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("secret", "shared")]
    assert modes == [0o600, 0o644]


@pytest.mark.parametrize(
    ("number", "free", "words"),
    [
        (errno.ENOSPC, 7, "make room there"),
        (errno.ENOSPC, 0, "no inode is free"),
        (errno.EDQUOT, 7, "the quota; it may bound bytes or the number of files"),
        (errno.EIO, 0, ""),
    ],
)
def test_what_a_full_file_system_lacks_is_named(number, free, words, monkeypatch, tmp_path):
    status = types.SimpleNamespace(f_files=576, f_favail=free)
    seen = []
    monkeypatch.setattr(os, "statvfs", lambda path: seen.append(path) or status)
    found = full_words(OSError(number, "x", str(tmp_path / "missing")))
    assert words in found and bool(words) == bool(found)
    assert seen in ([], [str(tmp_path)])


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    file, fifo, device = tmp_path / "file", tmp_path / "fifo", tmp_path / "zero"
    file.write_text('{"a": 1}')
    os.mkfifo(fifo)
    device.symlink_to("/dev/zero")
    assert read_regular(file, 8) == b'{"a": 1}'
    for path in (fifo, device, tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_regular(path)
        assert read_object(path) == {} and text_or_empty(path) == ""
    with pytest.raises(OSError, match="larger than 7 bytes"):
        read_regular(file, 7)
    for text in ("[" * 100_000, "[1]", "{", "\xff"):
        file.write_bytes(text.encode("latin-1"))
        assert read_object(file) == {}
