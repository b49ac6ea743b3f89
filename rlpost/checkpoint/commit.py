"""The commit protocol: how a folder full of files becomes a checkpoint, all of it or none. Pure file work.

    begin    .writing-iter_0000020/         writers of all ranks fill it
    commit   every file flushed, MANIFEST.json with size and SHA-256 of each
             rename to iter_0000020/        an older one of the same step steps aside as .replaced-iter_0000020/
             COMMITTED inside               from here on it counts
             latest                         names it, for people; no code reads it
    prune    after the commit: older ones go

In: a folder on a file system whose rename is atomic; one process at a time commits into it. Invariant: whatever the
instant of a crash, ``newest_committed`` finds the newest checkpoint that was complete, with the bytes that were
written, and the next ``begin`` works. The order (write, fsync the file, rename, fsync the folder) is that of Pillai et
al., All File Systems Are Not Created Equal, OSDI 2014.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlpost.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
COMMITTED = "COMMITTED"
LATEST = "latest"
WRITING, REPLACED, DELETING = ".writing-", ".replaced-", ".deleting-"
NUM_HASH_THREADS = 8
_NAME = re.compile(r"(?:\.replaced-)?iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class Search:
    """What ``newest_committed`` found: the checkpoint, or None, and newer folders it skipped, each with the reason."""

    path: Path | None
    skipped: tuple[tuple[Path, str], ...]


def checkpoint_name(step: int) -> str:
    """The name of the folder of a step: iter_0000020."""
    return f"iter_{step:07d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder that ``newest_committed`` or ``commit`` returned."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def begin(folder: str | Path, step: int) -> Path:
    """A new empty folder to write the checkpoint of ``step`` into; leftovers of an earlier attempt are removed."""
    writing = Path(folder) / (WRITING + checkpoint_name(step))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if writing.exists():
        _delete(writing)
    os.mkdir(writing, 0o700)
    return writing


def commit(writing: Path) -> Path:
    """Make what lies in ``writing``, a folder from ``begin``, the checkpoint of its step. Returns its final path.

    All writers must have finished. Raises CheckpointError when the folder is empty.
    """
    folder, name = writing.parent, writing.name.removeprefix(WRITING)
    final, replaced = folder / name, folder / (REPLACED + name)
    manifest = _seal(writing)
    if final.exists():
        if defect(final) is None:
            if replaced.exists():
                _delete(replaced)
            os.rename(final, replaced)
        else:
            _delete(final)
    os.rename(writing, final)
    _sync_folder(folder)
    _write_durably(final / COMMITTED, _digest(manifest) + "\n")
    _write_durably(folder / LATEST, name + "\n")
    if replaced.exists():
        _delete(replaced)
    return final


def newest_committed(folder: str | Path, *, checksums: bool = True) -> Search:
    """The newest complete checkpoint in ``folder``; without ``checksums`` only sizes are compared.

    A folder that is incomplete or damaged is skipped, with the reason, and the next older one is tried.
    """
    skipped: list[tuple[Path, str]] = []
    for path in _candidates(Path(folder)):
        problem = defect(path, checksums=checksums)
        if problem is None:
            return Search(path, tuple(skipped))
        skipped.append((path, problem))
    return Search(None, tuple(skipped))


def defect(path: Path, *, checksums: bool = True) -> str | None:
    """Why a checkpoint folder does not count, in words; None when it is complete and as it was written."""
    try:
        marker = (path / COMMITTED).read_text().strip()
        manifest = (path / MANIFEST).read_text()
    except FileNotFoundError as error:
        return f"it has no {Path(error.filename).name}: it was not committed"
    if marker != _digest(manifest):
        return f"{COMMITTED} does not belong to {MANIFEST}"
    entries: dict[str, dict[str, int | str]] = json.loads(manifest)["files"]
    for name, entry in entries.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size_bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size_bytes']}"
    if checksums:
        with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
            for name, digest in zip(entries, pool.map(_file_digest, (path / name for name in entries)), strict=True):
                if digest != entries[name]["sha256"]:
                    return f"{name} is damaged: its SHA-256 is not that of {MANIFEST}"
    return None


def prune(folder: str | Path, keep_last: int) -> tuple[Path, ...]:
    """Delete all but the ``keep_last`` newest complete checkpoints, and leftovers of crashes. Returns what was deleted.

    Call it after a commit and never while a checkpoint is being written. Only sizes are compared. A folder newer than
    those kept is left alone, complete or not; with no complete checkpoint nothing is deleted.
    """
    assert keep_last >= 1, keep_last
    folder = Path(folder)
    kept = [path for path in _candidates(folder) if defect(path, checksums=False) is None][:keep_last]
    if not kept:
        return ()
    oldest = step_of(kept[-1])
    old = [path for path in _candidates(folder) if path not in kept and step_of(path) <= oldest]
    leftovers = [path for path in folder.iterdir() if path.name.startswith((WRITING, DELETING))]
    for path in old + leftovers:
        _delete(path)
    return tuple(old + leftovers)


def _candidates(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first; of one step the one in place before the one that stepped aside."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (-step_of(path), path.name.startswith(REPLACED)))


def _seal(writing: Path) -> str:
    """Flush every file and folder, write the manifest and return its text."""
    files = sorted(path for path in writing.rglob("*") if path.is_file() and path.name != MANIFEST)
    if not files:
        raise CheckpointError(f"{writing} holds no file; write the checkpoint before committing it")
    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
        digests = list(pool.map(_file_digest, files))
    entries = {
        str(file.relative_to(writing)): {"size_bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, digests, strict=True)
    }
    for file in files:
        _sync_file(file)
    for path in sorted(path for path in writing.rglob("*") if path.is_dir()):
        _sync_folder(path)
    manifest = json.dumps({"files": entries}, indent=1) + "\n"
    _write_durably(writing / MANIFEST, manifest)
    return manifest


def _delete(path: Path) -> None:
    """Remove a folder such that a half-removed one is never taken for a checkpoint."""
    doomed = path
    if not path.name.startswith(DELETING):
        doomed = path.with_name(DELETING + path.name.lstrip("."))
        if doomed.exists():
            shutil.rmtree(doomed)
        os.rename(path, doomed)
    shutil.rmtree(doomed)


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
