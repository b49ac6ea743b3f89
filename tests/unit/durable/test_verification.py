"""Damage of committed checkpoints that sizes do not show, found by processes that divide the files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rlpost.durable import commit as protocol
from rlpost.durable import run_files
from rlpost.durable.commit import begin, commit, newest_committed
from rlpost.durable.verification import check_files
from rlpost.errors import CheckpointError


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    try:
        check_files(folder, part=part, parts=parts)
    except CheckpointError as error:
        return str(error)
    return None


def test_ranks_that_divide_the_files_find_a_blank_block_wherever_it_is(tmp_path):
    """As file systems leave it after a crash of a storage server; sizes and times stay."""
    writing = begin(tmp_path, 5)
    (writing / "critic").mkdir()
    names = ["a.distcp", "b.distcp", "critic/a.distcp", "common.pt"]
    for number, name in enumerate(names):
        (writing / name).write_bytes(bytes(range(1, 256)) * (number + 1))
    path = commit(writing)
    for parts in (1, 3, 9):
        assert [damage(path, part=part, parts=parts) for part in range(parts)] == [None] * parts
    for name in names:
        content, before = (path / name).read_bytes(), (path / name).stat()
        (path / name).write_bytes(content[:100] + bytes(100) + content[200:])
        os.utime(path / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert newest_committed(tmp_path, checksums=False).path == path, "sizes do not show it"
        for parts in (1, 3, 9):
            found = [damage(path, part=part, parts=parts) for part in range(parts)]
            (only,) = filter(None, found)
            assert f"{name} is damaged" in only
        of_critic = damage(path / "critic")
        assert (of_critic is None) == (not name.startswith("critic")), "its own files alone"
        (path / name).write_bytes(content)


def test_a_folder_that_no_commit_made_has_no_digests(tmp_path):
    (tmp_path / "a.distcp").write_bytes(b"x")
    assert damage(tmp_path) is None


def test_each_byte_that_is_read_is_hashed_once_and_others_are_not(tmp_path, monkeypatch):
    writing = begin(tmp_path, 5)
    (writing / "critic").mkdir()
    for name in ("a.distcp", "b.distcp", "critic/a.distcp", "common.pt"):
        (writing / name).write_text(name)
    path, hashed = commit(writing), []
    digest = protocol._file_digest
    monkeypatch.setattr(protocol, "_file_digest", lambda one: hashed.append(one) or digest(one))
    for part in range(2):
        check_files(path, {"a.distcp", "common.pt"}, part=part, parts=2)
    assert sorted(hashed) == [path / "a.distcp", path / "common.pt"]
    hashed.clear()
    check_files(path / "critic", {"a.distcp"})
    assert hashed == [path / "critic/a.distcp"]


def test_a_read_that_fails_for_a_moment_is_repeated(tmp_path, monkeypatch):
    """A file server fails over while the ranks compare."""
    monkeypatch.setattr(run_files, "RETRY_AFTER_S", (0.0, 0.0))
    writing = begin(tmp_path, 5)
    (writing / "a.distcp").write_text("a")
    path, digest, failures = commit(writing), protocol._file_digest, [1, 1]

    def flaky(one: Path) -> str:
        if failures:
            failures.pop()
            raise OSError(errno.EIO, "Input/output error", str(one))
        return digest(one)

    monkeypatch.setattr(protocol, "_file_digest", flaky)
    check_files(path)
    assert failures == []
