"""Invariant: a full disk is reported by name within seconds; a disk that cannot be read never
counts as full.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.agent.disks import DiskFull, WatchedFolder, places_of, shortage, until_full

MIB = 1 << 20


@pytest.mark.parametrize(
    ("room", "words"),
    [
        ((10_000 * MIB, 20_000 * MIB, 5, 100), None),
        ((63 * MIB, 20_000 * MIB, 5, 100), "63 MiB left of 20000"),
        ((0, 20_000 * MIB, 5, 100), "0 MiB left"),
        ((40 * MIB, 50 * MIB, 5, 100), None),  # a small one is not full from the start
        ((20 * MIB, 50 * MIB, 5, 100), "20 MiB left of 50"),
        ((10_000 * MIB, 20_000 * MIB, 0, 100), "no file name left of 100"),
        ((10_000 * MIB, 20_000 * MIB, 0, 0), None),  # btrfs has no number of inodes
        ((0, 0, 0, 0), None),  # some FUSE mounts know nothing
    ],
)
def test_full_is_what_leaves_no_room_to_write(
    room: tuple[int, int, int, int], words: str | None
) -> None:
    found = shortage(*room)
    assert found is None if words is None else found is not None and words in found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 8 MiB in memory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def watch(places: tuple[WatchedFolder, ...], seconds: float) -> DiskFull | None:
    async def watching() -> DiskFull | None:
        try:
            return await asyncio.wait_for(until_full(places), seconds)
        except TimeoutError:
            return None

    return asyncio.run(watching())


def test_a_disk_with_room_is_left_alone_and_nothing_stays_in_the_shared_folder(
    small_disk: Path,
) -> None:
    assert watch((WatchedFolder(small_disk, "the run folder", False, 0.0),), 0.3) is None
    assert list(small_disk.iterdir()) == []


def test_a_filled_disk_of_the_node_is_the_node_s_fault(small_disk: Path) -> None:
    (small_disk / "fill").write_bytes(bytes(6 * MIB))
    found = watch((WatchedFolder(small_disk, "Ray's temp dir", True, 0.0),), 5.0)
    assert found is not None and found.node_is_bad
    assert str(found).startswith(f"Ray's temp dir {small_disk} is full: 2 MiB left of 8; ")


def test_a_refused_write_counts_though_the_figures_look_well(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a quota, which statvfs does not report: the kernel rejects the write."""
    monkeypatch.setattr("bootstrap.agent.disks.shortage", lambda *_: None)
    (small_disk / "fill").write_bytes(bytes(8 * MIB))
    found = watch((WatchedFolder(small_disk, "the run folder", False, 0.0),), 5.0)
    assert found is not None and not found.node_is_bad and "no space left on device" in str(found)
    assert [path.name for path in small_disk.iterdir()] == ["fill"]


def test_a_folder_that_is_gone_is_not_full(tmp_path: Path) -> None:
    assert watch((WatchedFolder(tmp_path / "none", "the run folder", False, 0.0),), 0.2) is None


def test_nodes_watch_their_own_disk_and_the_head_the_shared_one_as_well() -> None:
    assert [place.belongs_to_node for place in places_of(Path("/tmp/r1"), None)] == [True]
    both = places_of(Path("/tmp/r1"), Path("/shared"))
    assert [place.belongs_to_node for place in both] == [True, False]
    assert both[1].grace_s > both[0].grace_s  # a checkpoint may fill the shared one for a moment
