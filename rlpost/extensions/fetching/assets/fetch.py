"""Fetch an asset: one process at a time downloads, checks and publishes; others wait.

The lock is a lease (filelock's SoftFileLease): a file with a heartbeat, made by exclusive creation,
which works on every shared file system. flock is not sufficient, because some file systems grant it
on every node.

A lease expires at once if its holder on the same node has died; for a holder on another node it
expires after ``STALE_S`` without a heartbeat, by the waiter's clock. A holder that was suspended
for longer detects the loss before it publishes and stops. Every file is checked in any case.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import SoftFileLease, Timeout

from common.files import sync
from rlpost.errors import AssetError
from rlpost.extensions.fetching.assets import store
from rlpost.extensions.fetching.assets.hub import Hub
from rlpost.extensions.fetching.assets.wanted import Asset, Listing

STALE_S = 180.0
BEAT_S = 20.0  # NFS may show a heartbeat a minute late
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches into ``root`` from ``hub`` (None: offline), ``workers`` files at a time.

    ``wait_s`` limits the wait for another fetch; ``report`` receives messages.
    """

    root: Path
    hub: Hub | None
    workers: int
    wait_s: float
    report: Callable[[str], None]

    def fetch(self, asset: Asset, *, compare: bool = False) -> store.AssetStatus:
        """Complete an asset's folder, or wait for another fetch; ``compare`` checks all digests.

        Raises:
            AssetError: the asset is unavailable or damaged, or its lease was held for too long.
        """
        stage = self.root / store.STAGES / asset.folder
        with lease(stage.with_name(f"{stage.name}.lock"), self.wait_s, self.report) as check:
            place = store.inspect(asset, self.root, self.hub.listing if self.hub else None)
            folder, listing = place.folder, place.listing
            if place.is_there and not (compare and listing):
                return place
            wrong = store.damage(folder, listing.files, deep=True) if listing else {}
            if listing is None or (wrong and self.hub is None):
                problem = store.first(wrong) if wrong else place.remark
                raise AssetError(
                    f"{folder}: {problem}; unset HF_HUB_OFFLINE to download it from the hub"
                )
            has_record = store.read_record(folder) is not None
            if wrong and not has_record and store.is_occupied(folder):
                raise AssetError(
                    f"{folder} is not {asset.repository} at {listing.commit[:12]}: {store.first(wrong)} "
                    f"({len(wrong)} files differ); move it away and call again, or remove its entry from [assets]"
                )
            if wrong:
                if has_record:
                    self.report(
                        f"{folder}: {store.first(wrong)}; {len(wrong)} files are fetched again"
                    )
                self._download(asset, listing, wrong, stage)
                check()
                _publish(stage, folder, wrong)
            elif not has_record:
                self.report(f"{folder}: existing files match the hub")
                store.write_record(folder, asset, listing)
            return store.inspect(asset, self.root)

    def _download(
        self, asset: Asset, listing: Listing, paths: Collection[str], stage: Path
    ) -> None:
        """Download files into the stage and check them; complete files of a killed fetch are kept."""
        assert self.hub is not None, "offline"
        recorded = store.read_record(stage)
        if recorded is None or recorded.commit != listing.commit:
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir(parents=True)
        store.write_record(stage, asset, listing)
        self.hub.download(asset, listing.commit, paths, stage, workers=max(1, self.workers))
        shutil.rmtree(stage / ".cache", ignore_errors=True)  # of huggingface_hub
        files = [file for file in listing.files if file.path in paths]
        if wrong := store.damage(stage, files, deep=True):
            for path in wrong:  # the complete ones are kept
                (stage / path).unlink(missing_ok=True)
            raise AssetError(
                f"{asset.repository}: {store.first(wrong)}: a download was damaged; check the proxy, "
                "and run the command again"
            )


def _publish(stage: Path, folder: Path, paths: Collection[str]) -> None:
    """Rename the complete stage to its final name, or replace damaged files of the folder."""
    if not store.is_occupied(folder):
        stage.rename(folder)  # also over an empty folder
        sync(folder.parent)
        return
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (stage / path).replace(folder / path)
    shutil.rmtree(stage)


@contextlib.contextmanager
def lease(path: Path, wait_s: float, report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold a lease; yield a check that raises AssetError if another process has taken it over.

    Raises:
        AssetError: another process still holds the lease after ``wait_s`` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = SoftFileLease(
        path, lease_duration=STALE_S, heartbeat_interval=BEAT_S, thread_local=False
    )

    def holder() -> str:
        owner = lock.owner
        if owner is None:
            return "another process"
        # filelock appends the PID namespace of a container to the host's name
        return f"process {owner.pid} on {owner.hostname.partition('?')[0]}"

    def check() -> None:
        owner = lock.owner  # may be None for a moment; only the heartbeat detects a loss
        if lock.compromise or (owner and owner.token != lock.token):
            raise AssetError(
                f"{path}: taken over by {holder()}; this fetch stops; run the command again"
            )

    reported: list[str] = []

    def report_once() -> bool:
        if not reported and lock.owner is not None:  # None while the other process writes its name
            reported.append(f"waiting for {holder()}, which fetches {path.stem}")
            report(reported[0])
        return False  # continue to wait

    try:
        held = lock.acquire(timeout=wait_s, poll_interval=POLL_S, cancel_check=report_once)
    except Timeout:
        raise AssetError(
            f"{path}: held by {holder()} for longer than --wait-s {wait_s:g}"
        ) from None
    with held:
        yield check
