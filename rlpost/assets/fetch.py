"""From what a recipe wants to whole folders: what is there, what is missing, whether it fits, and the fetching.

In: assets, the folder of assets, a hub (none when offline). Out: folders, or an AssetError. A file counts only after
its size and digest were those that the hub names; one that is damaged is fetched anew once.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlpost.assets.lock import Lease, held
from rlpost.assets.store import STAGES, Stage, damage, digest_of, read_manifest, write_manifest
from rlpost.assets.wanted import Asset, HubFile, Listing
from rlpost.errors import AssetError
from rlpost.units import size_text


class Source(Protocol):
    """A hub."""

    def listing(self, asset: Asset) -> Listing:
        """The files of a repository."""
        ...

    def download(self, asset: Asset, commit: str, file: HubFile, part: Path, wrote: Callable[[int], None]) -> None:
        """Bring ``part`` to the file's size, from where it ends."""
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """How an asset stands: ``listing`` is None when only the hub could say; ``missing_bytes`` are still to come."""

    asset: Asset
    folder: Path
    listing: Listing | None
    missing_bytes: int
    is_there: bool
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Manner:
    """How to fetch: files at a time, seconds to wait for another fetcher, who is told lines and counts of bytes."""

    workers: int
    wait_s: float
    tell: Callable[[str], None]
    wrote: Callable[[int], None]


def standing(asset: Asset, root: Path, source: Source | None) -> Standing:
    """Look at an asset; the hub is asked only for what is not there with a manifest. Raises AssetError."""
    folder = root / asset.folder
    kept = read_manifest(folder, asset) if folder.is_dir() else None
    if kept is not None:
        wrong = damage(folder, kept.files, deep=False)
        if not wrong:
            return Standing(asset, folder, kept, 0, True, f"commit {kept.commit[:12]}")
        sizes = {file.path: file.size for file in kept.files}
        missing = sum(sizes[path] for path in wrong)
        return Standing(asset, folder, kept, missing, False, f"{_first(wrong)}: damaged")
    if source is None:
        if folder.is_dir() and any(folder.iterdir()):
            return Standing(asset, folder, None, 0, True, "there without a manifest: not compared with the hub")
        return Standing(asset, folder, None, 0, False, "not there")
    listing = source.listing(asset)
    if folder.is_dir() and any(folder.iterdir()):
        return Standing(asset, folder, listing, 0, False, "there without a manifest: to be compared with the hub")
    missing = listing.size - Stage(root, asset).held_bytes(listing.files)
    return Standing(asset, folder, listing, missing, False)


def room_problem(standings: Sequence[Standing], root: Path) -> str | None:
    """Why it does not fit, with both numbers; None when it does. A quota is not seen."""
    needed, free = sum(one.missing_bytes for one in standings), shutil.disk_usage(existing(root)).free
    if needed <= free:
        return None
    return (
        f"{size_text(needed)} are to come and {size_text(free)} are free in {root}: make room, "
        "or name another folder (--assets-dir, RLPOST_ASSETS)"
    )


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def fetch(asset: Asset, root: Path, source: Source | None, manner: Manner, *, deep: bool = False) -> Standing:
    """Bring an asset to its folder, or wait until another fetcher has; with ``deep`` its content is compared as well.

    Raises:
        AssetError: not to be had, damaged, or held by another fetcher for too long.
    """
    with held(root / STAGES, asset.folder, wait_s=manner.wait_s, tell=manner.tell) as lease:
        found = standing(asset, root, source)
        if found.is_there:
            wrong = damage(found.folder, found.listing.files, deep=True) if deep and found.listing else {}
            if not wrong:
                return found
        if found.listing is None or source is None:
            problem = found.remark if not found.is_there else "damaged"
            raise AssetError(f"{found.folder}: {problem}, and the hub is not asked (HF_HUB_OFFLINE)")
        if not found.folder.is_dir() or not any(found.folder.iterdir()):
            return _whole(found, Stage(root, asset), source, manner, lease)
        if read_manifest(found.folder, asset) is None:
            return _adopted(found)
        return _mended(found, Stage(root, asset), source, manner, lease)


def _whole(found: Standing, stage: Stage, source: Source, manner: Manner, lease: Lease) -> Standing:
    assert found.listing is not None
    _download(stage.missing(found.listing.files), found, stage, source, manner, lease)
    lease.check()
    if found.folder.is_dir():
        found.folder.rmdir()  # empty
    stage.publish(found.folder, found.asset, found.listing)
    return Standing(found.asset, found.folder, found.listing, 0, True, f"commit {found.listing.commit[:12]}")


def _adopted(found: Standing) -> Standing:
    """A folder that somebody else has put there: its content is that of the hub, or it is not touched."""
    assert found.listing is not None
    wrong = damage(found.folder, found.listing.files, deep=True)
    if wrong:
        raise AssetError(
            f"{found.folder} is not {found.asset.repository} at {found.listing.commit[:12]}: {_first(wrong)}"
            f"{f' and {len(wrong) - 1} more files' if len(wrong) > 1 else ''}; move it away and call again, "
            "or take its entry out of [assets]"
        )
    write_manifest(found.folder, found.asset, found.listing)
    return Standing(found.asset, found.folder, found.listing, 0, True, "was there, equals the hub")


def _mended(found: Standing, stage: Stage, source: Source, manner: Manner, lease: Lease) -> Standing:
    """Files that are missing or damaged in a folder that was whole once, at the commit that it was."""
    assert found.listing is not None
    wrong = damage(found.folder, found.listing.files, deep=True)
    manner.tell(f"{found.folder}: {_first(wrong)}; {len(wrong)} files are fetched anew")
    files = [file for file in found.listing.files if file.path in wrong]
    _download(stage.missing(files), found, stage, source, manner, lease)
    lease.check()
    for file in files:
        target = found.folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        (stage.folder / file.path).replace(target)
    shutil.rmtree(stage.folder)
    return Standing(found.asset, found.folder, found.listing, 0, True, f"{len(files)} files mended")


def _download(
    files: Sequence[HubFile], found: Standing, stage: Stage, source: Source, manner: Manner, lease: Lease
) -> None:
    """Fetch and check files, several at a time. The first error ends all; what has come stays."""
    stage.parts.mkdir(parents=True, exist_ok=True)
    left: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
    for file in files:
        left.put(file)
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    stop = threading.Event()

    def wrote(count: int) -> None:
        if stop.is_set():
            raise AssetError("stopped")
        lease.check()
        manner.wrote(count)

    def work() -> None:
        while not stop.is_set():
            try:
                _one(left.get_nowait(), found, stage, source, wrote)
            except queue.Empty:
                return
            except BaseException as error:
                errors.put(error)
                stop.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(manner.workers, len(files)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    if not errors.empty():
        raise errors.get()


def _one(file: HubFile, found: Standing, stage: Stage, source: Source, wrote: Callable[[int], None]) -> None:
    """Fetch one file and check it; a damaged one is fetched once more, from its beginning."""
    assert found.listing is not None
    part = stage.part(file)
    if part.is_file() and part.stat().st_size > file.size:
        part.unlink()
    for _ in range(2):
        source.download(found.asset, found.listing.commit, file, part, wrote)
        digest = digest_of(part, file.digest)
        if digest == file.digest:
            stage.take(file)
            return
        wrote(-part.stat().st_size)
        part.unlink()
    raise AssetError(
        f"{found.asset.repository}: {file.path} came damaged twice: {digest}, the hub names {file.digest}; "
        "a proxy in between, or the hub itself: call again later"
    )


def _first(wrong: dict[str, str]) -> str:
    path, what = next(iter(wrong.items()), ("", "nothing"))
    return f"{path}: {what}"
