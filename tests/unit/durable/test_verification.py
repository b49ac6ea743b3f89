"""Damage of committed checkpoints that sizes do not show, found by processes that divide the files."""

from __future__ import annotations

import os
from pathlib import Path

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
