"""Assets on disk: their records, the check of files against them, the staging folder.

ASSETS/NAME/          complete; .rlpost-asset.json in it holds commit, sizes and digests
ASSETS/.fetch/NAME/   in progress, with the record of the complete asset; renamed to ASSETS/NAME at the end
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from common.files import write_atomic
from rlpost.errors import AssetError
from rlpost.extensions.fetching.assets.wanted import Asset, HubFile, Listing
from rlpost.trainer.weights.hf_folder import ASSET_RECORD

RECORD = ASSET_RECORD
STAGES = ".fetch"


@dataclass(frozen=True, slots=True)
class AssetStatus:
    """State of an asset.

    ``listing`` is None if unknown; ``missing_bytes`` are still to download, without the complete
    files of a fetch that was interrupted.
    """

    asset: Asset
    folder: Path
    listing: Listing | None
    missing_bytes: int
    is_there: bool
    remark: str = ""


def inspect(asset: Asset, root: Path, ask: Callable[[Asset], Listing] | None = None) -> AssetStatus:
    """Compare files with the record or, without one, with ``ask``. Raises AssetError."""
    folder = root / asset.folder
    recorded = read_record(folder, asset)
    if recorded is not None:
        wrong = damage(folder, recorded.files, deep=False)
        lacking = [file for file in recorded.files if file.path in wrong]
        missing = _bytes_to_come(root, asset, recorded.commit, lacking)
        remark = f"{first(wrong)}: damaged" if wrong else f"commit {recorded.commit[:12]}"
        return AssetStatus(asset, folder, recorded, missing, not wrong, remark)
    occupied = is_occupied(folder)
    if ask is None:
        remark = "has no record: not compared with the hub" if occupied else "does not exist"
        return AssetStatus(asset, folder, None, 0, occupied, remark)
    listing = ask(asset)
    if occupied:
        return AssetStatus(
            asset, folder, listing, 0, False, "has no record: will be compared with the hub"
        )
    missing = _bytes_to_come(root, asset, listing.commit, listing.files)
    return AssetStatus(asset, folder, listing, missing, False)


def _bytes_to_come(root: Path, asset: Asset, commit: str, files: Iterable[HubFile]) -> int:
    """Return the bytes of files that the staging folder lacks; one of another commit is not used."""
    stage = root / STAGES / asset.folder
    staged = read_record(stage)
    is_kept = staged is not None and staged.commit == commit
    return sum(
        file.size for file in files if not (is_kept and size_of(stage / file.path) == file.size)
    )


def is_occupied(folder: Path) -> bool:
    """Whether a folder exists and is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def digest_of(path: Path, like: str) -> str:
    """Return a file's digest in the form of ``like``: ``sha256:HEX`` or git's ``git:HEX``."""
    kind = like.partition(":")[0]
    if kind == "git":
        content = path.read_bytes()  # small: the hub identifies large files by SHA-256
        blob = b"blob %d\0" % len(content) + content
        return f"git:{hashlib.sha1(blob).hexdigest()}"
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def damage(folder: Path, files: Iterable[HubFile], *, deep: bool) -> dict[str, str]:
    """Return the problem of each missing or wrong file by path; ``deep`` compares digests too."""
    found: dict[str, str] = {}
    for file in files:
        path = folder / file.path
        size = size_of(path)
        if size is None:
            found[file.path] = "missing"
        elif size != file.size:
            found[file.path] = f"{size} bytes, {file.size} expected"
        elif deep and (digest := digest_of(path, file.digest)) != file.digest:
            found[file.path] = f"{digest}, {file.digest} expected"
    return found


def first(wrong: dict[str, str]) -> str:
    """Return the first result of ``damage`` as text."""
    return ": ".join(next(iter(wrong.items())))


def size_of(path: Path) -> int | None:
    """Return the bytes of a file, or None.

    A single stat call, because another fetch may move the folder.
    """
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_record(folder: Path, asset: Asset | None = None) -> Listing | None:
    """Return the record of a folder, or None.

    Raises AssetError if it is unreadable or of another asset.
    """
    path = folder / RECORD
    try:
        content = json.loads(path.read_text())
        files = [
            HubFile(name, entry["size"], entry["digest"])
            for name, entry in content["files"].items()
        ]
        repository, commit = content["repository"], content["commit"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AssetError(
            f"{path} cannot be read ({error!r}); remove it to compare files with the hub"
        ) from None
    if asset and repository != asset.repository:
        raise AssetError(
            f"{folder} holds {repository}, the recipe wants {asset.repository}: move it, or name another --assets-dir"
        )
    if asset and asset.revision and len(asset.revision) == len(commit) and asset.revision != commit:
        raise AssetError(
            f"{folder} is at commit {commit}, the recipe wants {asset.revision}: move it away"
        )
    return Listing(commit, tuple(files))


def write_record(folder: Path, asset: Asset, listing: Listing) -> None:
    """Write the record atomically."""
    files = {file.path: {"size": file.size, "digest": file.digest} for file in listing.files}
    content = {
        "repository": asset.repository,
        "kind": asset.kind,
        "commit": listing.commit,
        "files": files,
    }
    write_atomic(folder / RECORD, json.dumps(content, indent=1) + "\n", mode=0o666)
