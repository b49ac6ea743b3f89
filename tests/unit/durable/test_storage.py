"""Failing storage: full, read-only, unreadable, damaged, or with a stale listing.

The previous checkpoint is used, or an error names the cause; nothing hangs and nothing is lost.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.durable import commit as protocol
from rlpost.durable.commit import begin, checkpoint_name, commit, newest_committed, prune
from rlpost.durable.ownership import claim
from rlpost.errors import CheckpointError

SHARD = 200_000


def write(folder: Path, step: int, num_bytes: int = 1000) -> Path:
    writing = begin(folder, step)
    (writing / "state.json").write_text("{}")
    (writing / "shard").write_bytes(os.urandom(num_bytes))
    (writing / "ranks").mkdir()
    (writing / "ranks/shard").write_bytes(b"whole")
    return commit(writing)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], capture_output=True
    ).returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_the_previous_checkpoint_and_the_next_save_has_space(disk):
    """What the failed save left is what fills the disk; the next one begins by removing it."""
    ours = claim(disk, "0")
    before = write(disk, 1, SHARD)
    writing = begin(disk, 2, lane=ours.lane)
    with pytest.raises(OSError) as raised:
        (writing / "shard").write_bytes(os.urandom(2 * SHARD))
    assert raised.value.errno == errno.ENOSPC and newest_committed(disk).path == before
    writing = begin(disk, 3, lane=ours.lane)
    (writing / "shard").write_bytes(os.urandom(SHARD))
    assert commit(writing, check=ours.check) == newest_committed(disk).path != before


def test_a_disk_that_fills_up_at_the_manifest_keeps_the_previous_checkpoint(disk):
    before = write(disk, 1)
    writing = begin(disk, 2)
    (writing / "shard").write_bytes(b"x")
    with contextlib.suppress(OSError), open(disk / "other", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        commit(writing)
    assert newest_committed(disk).path == before
    (disk / "other").unlink()
    assert commit(writing) == newest_committed(disk).path, (
        "it may be committed later, when there is room"
    )


def test_a_read_only_disk_is_readable_and_reported_at_a_write(disk):
    before = write(disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert newest_committed(disk).path == before
    for attempt in (
        lambda: begin(disk, 2),
        lambda: claim(disk, "1"),
        lambda: prune(disk / ".", 1) or begin(disk, 3),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            attempt()


@pytest.fixture
def stranger() -> Iterator[Path]:
    """A folder that another user may enter; whoever runs the test is that user where ``with`` says
    so.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_unreadable_checkpoint_is_skipped_and_an_unreadable_folder_is_an_error(
    stranger,
):
    older, newer = write(stranger, 1), write(stranger, 2)
    older.chmod(0o755)
    with as_nobody():
        found = newest_committed(stranger)
    assert (
        found.path == older
        and found.skipped[0][0] == newer
        and "Permission denied" in found.skipped[0][1]
    )
    stranger.chmod(0o700)
    with (
        as_nobody(),
        pytest.raises(CheckpointError, match=r"cannot list checkpoints in .*Permission denied"),
    ):
        newest_committed(stranger)


def damage(path: Path, name: str, text: str | bytes) -> None:
    (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def with_manifest(path: Path, text: str) -> None:
    """A manifest that its marker vouches for."""
    damage(path, protocol.MANIFEST, text)
    damage(path, protocol.COMMITTED, protocol._digest(text))


DAMAGES = {
    "truncated shard": lambda path: os.truncate(path / "shard", 999),
    "empty shard": lambda path: os.truncate(path / "shard", 0),
    "flipped bit": lambda path: damage(path, "shard", flipped((path / "shard").read_bytes())),
    "truncated shard in a folder": lambda path: os.truncate(path / "ranks/shard", 4),
    "missing shard": lambda path: (path / "shard").unlink(),
    "a pipe in its place": lambda path: ((path / "shard").unlink(), os.mkfifo(path / "shard")),
    "a folder in its place": lambda path: ((path / "shard").unlink(), (path / "shard").mkdir()),
    "missing manifest": lambda path: (path / protocol.MANIFEST).unlink(),
    "a pipe for a manifest": lambda path: (
        (path / protocol.MANIFEST).unlink(),
        os.mkfifo(path / protocol.MANIFEST),
    ),
    "missing marker": lambda path: (path / protocol.COMMITTED).unlink(),
    "empty marker": lambda path: damage(path, protocol.COMMITTED, ""),
    "marker of noise": lambda path: damage(path, protocol.COMMITTED, b"\xff\xfe\x00"),
    "manifest of noise": lambda path: damage(path, protocol.MANIFEST, b"\xff\xfe\x00"),
    "a manifest of other files": lambda path: damage(
        path, protocol.MANIFEST, (path / protocol.MANIFEST).read_text().replace("1000", "2000")
    ),
    "half a manifest": lambda path: with_manifest(path, '{"files": {"shard": {"size_b'),
    "a manifest of another kind": lambda path: with_manifest(path, "[1, 2]"),
    "a manifest without files": lambda path: with_manifest(path, "{}"),
    "a manifest with odd entries": lambda path: with_manifest(
        path, json.dumps({"files": {"shard": 7}})
    ),
    "a manifest with a list": lambda path: with_manifest(path, json.dumps({"files": ["shard"]})),
}


def flipped(data: bytes) -> bytes:
    return data[:500] + bytes([data[500] ^ 1]) + data[501:]


@pytest.mark.parametrize("name", DAMAGES)
def test_after_any_damage_the_previous_checkpoint_is_used_and_the_reason_reported(tmp_path, name):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    DAMAGES[name](newer)
    found = newest_committed(tmp_path)
    assert found.path == older
    ((path, reason),) = found.skipped
    assert path == newer and any(word in reason for word in ("shard", "MANIFEST", "COMMITTED")), (
        reason
    )


def test_a_listing_that_lacks_the_newest_finds_it_by_its_name(tmp_path, monkeypatch):
    """As a client of NFS may show it: the folder is there, its listing is of a minute ago."""
    write(tmp_path, 1)
    newer = write(tmp_path, 2)
    real = os.listdir
    monkeypatch.setattr(
        protocol.os, "listdir", lambda path: [name for name in real(path) if name != newer.name]
    )
    assert newest_committed(tmp_path) == protocol.Search(newer, ())


def test_a_listing_with_a_deleted_checkpoint_leads_to_the_previous_one(tmp_path, monkeypatch):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    shutil.rmtree(newer)
    real = os.listdir
    monkeypatch.setattr(
        protocol.os, "listdir", lambda path: [*real(path), newer.name, checkpoint_name(3)]
    )
    found = newest_committed(tmp_path)
    assert found.path == older and found.skipped == (
        (newer, "the file latest names it, but it does not exist"),
    )
    assert protocol.was_committed(newer)


def test_a_folder_that_disappears_during_a_search_is_skipped(tmp_path, monkeypatch):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)

    def gone(path):
        if newer in path.parents:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path)

    real = protocol._file_digest
    monkeypatch.setattr(protocol, "_file_digest", gone)
    found = newest_committed(tmp_path)
    assert found.path == older and "Stale file handle" in found.skipped[0][1]


def test_folders_of_other_programs_are_not_changed(tmp_path):
    """Megatron-LM's checkpoints have the same names; a person may point --save to a folder that has
    some.
    """
    theirs = tmp_path / checkpoint_name(1)
    theirs.mkdir()
    (theirs / "metadata.json").write_text("{}")
    ours = claim(tmp_path, "0")
    for step in (2, 3):
        write(tmp_path, step)
    prune(tmp_path, 1, lane=ours.lane)
    assert theirs.is_dir() and not (tmp_path / checkpoint_name(2)).exists() and ours.lane.is_dir()
