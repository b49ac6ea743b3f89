"""Detect disks that fill during a run, before Ray and the driver fail with less specific errors.

Input: the folder of Ray's session on this node and, on the head, the run folder. Output: ``DiskFull``. Each disk is
polled every second and must stay full for its grace period, because a checkpoint may fill a disk briefly before older
ones are removed. A disk that cannot be read never counts as full.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOK_EVERY_S = 1.0
_MIB = 1 << 20
# Ray's raylet, a log and a verdict still find room for their last words.
_FULL_BYTES = 64 * _MIB
_PROBE_EVERY_S = 5.0
_PROBE_BYTES = 65_536
_RESERVE = ".room"
_NO_ROOM = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "disk quota exceeded"}


class DiskFull(Exception):
    """A place is full; ``node_is_bad`` when it belongs to this node, so that another node would have room."""

    def __init__(self, cause: str, *, node_is_bad: bool) -> None:
        super().__init__(cause)
        self.node_is_bad = node_is_bad


@dataclass(frozen=True, slots=True)
class WatchedFolder:
    """A folder to watch; ``stands_s`` is for how long it has to be full."""

    folder: Path
    what: str
    belongs_to_node: bool
    stands_s: float


def places_of(ray_folder: Path, run_folder: Path | None) -> tuple[WatchedFolder, ...]:
    """What an agent watches: Ray's folder on its node; the run folder, which all share, only where it is given."""
    own = WatchedFolder(ray_folder, "Ray's temp dir", belongs_to_node=True, stands_s=1.0)
    return (own,) if run_folder is None else (own, WatchedFolder(run_folder, "the run folder", False, stands_s=10.0))


def shortage(free: int, total: int, free_inodes: int, num_inodes: int) -> str | None:
    """Why nothing more can be written where so much is free (bytes, inodes), or None.

    A file system of which nothing is known says 0 of 0 (some FUSE and overlay mounts), and without a fixed number of
    inodes (btrfs, Lustre at times) 0 inodes of 0.
    """
    if total > 0 and free < min(_FULL_BYTES, total // 2):
        return f"{free / _MIB:.0f} MiB left of {total / _MIB:.0f}"
    if num_inodes > 0 and free_inodes == 0:
        return f"no file name left of {num_inodes} (inodes)"
    return None


async def until_full(places: Sequence[WatchedFolder]) -> DiskFull:
    """Returns when one of the places is full, and says which; never otherwise."""
    watching = [asyncio.create_task(_until_full(place)) for place in places]
    try:
        done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in watching:
            task.cancel()


async def _until_full(place: WatchedFolder) -> DiskFull:
    loop = asyncio.get_running_loop()
    full_since: float | None = None
    probe_at = loop.time()
    try:
        while True:
            found = await asyncio.to_thread(_shortage_at, place.folder)  # a shared file system may stall
            # A quota shows in no figure of the file system, only to who writes; a shared one is asked less often.
            if found is None and not place.belongs_to_node and (full_since is not None or loop.time() >= probe_at):
                found = await asyncio.to_thread(_refusal_at, place.folder)
                probe_at = loop.time() + _PROBE_EVERY_S
            now = loop.time()
            full_since = None if found is None else now if full_since is None else full_since
            if full_since is not None and now - full_since >= place.stands_s:
                cause = f"{place.what} {place.folder} is full: {found}; make room there, or use another place"
                return DiskFull(cause, node_is_bad=place.belongs_to_node)
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        if not place.belongs_to_node:
            _give_back(place.folder / _RESERVE)  # room for the verdict


def _shortage_at(folder: Path) -> str | None:
    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    return shortage(room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize, room.f_favail, room.f_files)


def _refusal_at(folder: Path) -> str | None:
    """Why a small file cannot be written there for want of room, or None. The last that could stays as a reserve."""
    probe = folder / f"{_RESERVE}.new"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
        probe.replace(folder / _RESERVE)
    except OSError as error:
        _give_back(probe)
        return _NO_ROOM.get(error.errno or 0)
    return None


def _give_back(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
