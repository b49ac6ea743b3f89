"""An asset on disk: its manifest, the folder in which it is put together, whether its files are what they should be.

ASSETS/NAME/                      whole; .rlpost-asset.json in it says which commit, sizes, digests
ASSETS/.fetch/NAME/               being put together; renamed to ASSETS/NAME at the end
ASSETS/.fetch/NAME/.parts/        beginnings of files, by digest
ASSETS/.fetch/NAME/.checked       a line for each file that is whole and was checked
"""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from rlpost.assets.wanted import Asset, HubFile, Listing
from rlpost.errors import AssetError
from rlpost.files import sync, write_whole

MANIFEST = ".rlpost-asset.json"
STAGES = ".fetch"
_CHUNK_BYTES = 1 << 22


def digest_of(path: Path, like: str) -> str:
    """The digest of a file in the form of ``like``: ``sha256:HEX``, or ``git:HEX`` of the blob that git would make."""
    kind = like.partition(":")[0]
    counted = hashlib.sha256() if kind == "sha256" else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            counted.update(chunk)
    return f"{kind}:{counted.hexdigest()}"


def damage(folder: Path, files: Iterable[HubFile], *, deep: bool) -> dict[str, str]:
    """What is wrong with each file that is: missing, of another size, or (``deep``) of another content."""
    found: dict[str, str] = {}
    for file in files:
        path = folder / file.path
        size = _size(path)
        if size is None:
            found[file.path] = "missing"
        elif size != file.size:
            found[file.path] = f"{size} bytes, {file.size} expected"
        elif deep and (digest := digest_of(path, file.digest)) != file.digest:
            found[file.path] = f"{digest}, {file.digest} expected"
    return found


def manifest_text(asset: Asset, listing: Listing) -> str:
    """What is kept beside the files."""
    files = {file.path: {"size": file.size, "digest": file.digest} for file in listing.files}
    content = {"repository": asset.repository, "kind": asset.kind, "commit": listing.commit, "files": files}
    return json.dumps(content, indent=1) + "\n"


def read_manifest(folder: Path, asset: Asset) -> Listing | None:
    """What a folder holds by its manifest; None without one. Raises AssetError when it is of something else."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        files = [HubFile(name, entry["size"], entry["digest"]) for name, entry in content["files"].items()]
        repository, commit = content["repository"], content["commit"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise AssetError(
            f"{path} cannot be read ({error!r}); remove it, and the files are compared with the hub"
        ) from None
    if repository != asset.repository:
        raise AssetError(
            f"{folder} holds {repository}, the recipe wants {asset.repository}: move it, or name another --assets-dir"
        )
    if asset.revision and len(asset.revision) == len(commit) and asset.revision != commit:
        raise AssetError(f"{folder} is at commit {commit}, the recipe wants {asset.revision}: move it away")
    return Listing(commit, tuple(files))


class Stage:
    """The folder in which an asset is put together."""

    def __init__(self, root: Path, asset: Asset) -> None:
        self.folder = root / STAGES / asset.folder
        self.parts = self.folder / ".parts"
        self._checked = self.folder / ".checked"

    def part(self, file: HubFile) -> Path:
        """Where the beginning of a file lies: by its digest, so that another commit never goes on with it."""
        name = hashlib.sha256(file.path.encode()).hexdigest()[:12]  # two files may have one content
        return self.parts / f"{file.digest.partition(':')[2]}-{name}"

    def held_bytes(self, files: Iterable[HubFile]) -> int:
        """Of these files, what need not be fetched any more."""
        checked, held = self._lines(), 0
        for file in files:
            if self._is_whole(file, checked):
                held += file.size
            else:
                held += min(_size(self.part(file)) or 0, file.size)
        return held

    def missing(self, files: Iterable[HubFile]) -> list[HubFile]:
        """The files that are not whole here, the largest first."""
        checked = self._lines()
        return sorted((file for file in files if not self._is_whole(file, checked)), key=lambda file: -file.size)

    def take(self, file: HubFile) -> None:
        """Put a part that was checked in its place."""
        path = self.folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.part(file).replace(path)
        with self._checked.open("a") as lines:
            lines.write(json.dumps([file.path, file.digest]) + "\n")

    def publish(self, target: Path, asset: Asset, listing: Listing) -> None:
        """Give the whole folder its name: from one moment to the next it is there."""
        shutil.rmtree(self.parts, ignore_errors=True)
        kept = {self.folder / file.path for file in listing.files} | {self._checked}
        for path in [path for path in self.folder.rglob("*") if path.is_file()]:
            if path not in kept:
                path.unlink()  # of a commit that an earlier call wanted
        write_manifest(self.folder, asset, listing)
        self.folder.rename(target)
        sync(target.parent)
        (target / self._checked.name).unlink()

    def _is_whole(self, file: HubFile, checked: set[tuple[str, str]]) -> bool:
        return (file.path, file.digest) in checked and _size(self.folder / file.path) == file.size

    def _lines(self) -> set[tuple[str, str]]:
        found = set()
        try:
            lines = self._checked.read_text().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                path, digest = json.loads(line)
                found.add((path, digest))
            except ValueError:
                continue  # the last one of a process that was killed
        return found


def _size(path: Path) -> int | None:
    """Bytes of a file, None without one. One look, for another fetcher may move it at any moment."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def write_manifest(folder: Path, asset: Asset, listing: Listing) -> None:
    """Write or replace the manifest, whole or not at all."""
    write_whole(folder / MANIFEST, [manifest_text(asset, listing)])
