"""The commit protocol: turn a folder of files into a checkpoint, atomically. File operations only.

    begin    .writing-iter_0000020/         filled by the writers of all ranks
    commit   flush every file; write MANIFEST.json with size and SHA-256 of each
             rename to iter_0000020/        an older one becomes .replaced-iter_0000020/
             write COMMITTED inside         from here on the checkpoint is valid
             write latest                   for users; not needed for a commit
    prune    after the commit: delete older checkpoints

Input: a folder on a file system with atomic rename. One process at a time commits into it;
``ownership`` ensures that. Its writers work in a lane, ``.writing-TOKEN/.writing-iter_0000020/``. A
writer with a lane changes names outside the lane only by a rename into or out of it, so it has no
effect once a newer attempt has moved the lane. It writes inside its folder through a descriptor of
that folder, which stays valid after a rename.

Invariant: after a crash at any point, ``newest_committed`` finds the newest complete checkpoint,
with the bytes that were written, and the next ``begin`` works. The order (write, fsync the file,
rename, fsync the folder) is that of Pillai et al., All File Systems Are Not Created Equal, OSDI
2014. Storage errors while reading make a checkpoint invalid and never raise; while writing they
raise OSError and leave the previous checkpoint intact.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.files import sync, write_atomic, write_within
from rlpost.durable.run_files import read_again
from rlpost.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
COMMITTED = "COMMITTED"
LATEST = "latest"
OWNER = "OWNER"
WRITING, REPLACED, DELETING = ".writing-", ".replaced-", ".deleting-"
NUM_HASH_THREADS = 8
PREFIX = "iter_"
"""Begins the name of a checkpoint's folder."""
_NAME = re.compile(rf"(?:{re.escape(REPLACED)})?{PREFIX}(\d{{7,}})")


@dataclass(frozen=True, slots=True)
class Search:
    """Result of ``newest_committed``: the checkpoint or None, and skipped folders with reasons."""

    path: Path | None
    skipped: tuple[tuple[Path, str], ...]


def checkpoint_name(step: int) -> str:
    """Folder name of a step: iter_0000020."""
    return f"{PREFIX}{step:07d}"


def step_of(path: Path) -> int:
    """Step of a folder that ``newest_committed`` or ``commit`` returned."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def begin(folder: str | Path, step: int, *, lane: Path | None = None) -> Path:
    """Create an empty folder for the checkpoint of ``step``.

    It is in ``folder``, or in an existing lane of it.

    Leftovers of an earlier save of the step, and everything in the lane, are deleted to free disk
    space. What cannot be deleted yet (a file that an older attempt holds open on NFS) is retried by
    the next call.
    """
    writing = (Path(folder) if lane is None else lane) / (WRITING + checkpoint_name(step))
    if lane is None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        leftovers = [writing]
    else:
        rescue(Path(folder), lane)
        leftovers = list(lane.iterdir())
    for leftover in leftovers:
        if leftover.exists():
            try:
                _delete(leftover, lane)
            except OSError as error:
                logger.warning("cannot delete %s yet: %s", leftover, error)
    os.mkdir(writing, 0o700)
    return writing


def commit(writing: Path, *, check: Callable[[], None] = lambda: None) -> Path:
    """Commit ``writing``, a folder from ``begin``; returns the final path of the checkpoint.

    All writers must have finished. ``check`` may raise. It is called before the names change, and
    again once the folder is marked.

    Raises:
        CheckpointError: the folder is empty, or a checkpoint of another program has the name.
        OSError: the storage failed; the previous checkpoint is still the newest.
    """
    final, lane = _target(writing)
    folder = final.parent
    descriptor = os.open(writing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        manifest = _seal(writing)
        is_complete = final.exists() and defect(final) is None
        check()
        replaced = _step_aside(final, lane, is_complete=is_complete)
        try:
            os.rename(writing, final)
        except OSError:
            if replaced is not None and not final.exists():
                with suppress(OSError):
                    os.rename(replaced, final)
            raise
        sync(folder)
        # By descriptor: the name may now refer to a folder of another attempt, which must not be
        # marked.
        write_within(descriptor, COMMITTED, _digest(manifest) + "\n")
    finally:
        os.close(descriptor)
    check()  # a folder that was moved before it was marked is not a checkpoint
    _name_latest(folder, lane, final.name)
    if replaced is not None:
        _delete(replaced, lane)
    return final


def discard(writing: Path) -> None:
    """Delete what a failed save has written to ``writing``, a folder from ``begin``.

    This frees its disk space before the next save. A save that failed after the rename is deleted
    too, unless it is marked as committed. Raises OSError; the next ``begin`` deletes the rest.
    """
    final, lane = _target(writing)
    _delete(writing, lane)
    # Without a manifest it belongs to another program.
    if (final / MANIFEST).exists() and not os.path.lexists(final / COMMITTED):
        _delete(final, lane)


def _target(writing: Path) -> tuple[Path, Path | None]:
    """Return the final path of a folder from ``begin``, and the lane in which it is, if any."""
    lane = writing.parent if writing.parent.name.startswith(WRITING) else None
    folder = writing.parent if lane is None else lane.parent
    return folder / writing.name.removeprefix(WRITING), lane


def _step_aside(final: Path, lane: Path | None, *, is_complete: bool) -> Path | None:
    """Free the name ``final``; returns the new path of a complete checkpoint."""
    if not final.exists():
        return None
    if is_complete:
        replaced = (final.parent if lane is None else lane) / (REPLACED + final.name)
        if replaced.exists():
            _delete(replaced, lane)
        os.rename(final, replaced)
        # The new name must be durable first: after a power loss one of the two names must exist.
        sync(replaced.parent)
        return replaced
    if not _is_ours(final):
        raise CheckpointError(
            f"{final} exists and was not written by rlpost (Megatron uses the same names); move it, "
            "or use another --save"
        )
    _delete(final, lane)
    return None


def _name_latest(folder: Path, lane: Path | None, name: str) -> None:
    """Write ``latest``; the checkpoint is valid without it."""
    try:
        write_durably(folder / LATEST, name + "\n", beside=lane)
    except OSError as error:
        logger.warning(
            "%s is committed, but %s does not name it: %s", folder / name, folder / LATEST, error
        )


def rescue(folder: Path, lane: Path) -> None:
    """Restore complete checkpoints that an interrupted save moved into ``lane`` to replace them.

    They get their name back if no complete checkpoint has it. Lanes inside ``lane`` are included.
    """
    for replaced in _stepped_aside(lane):
        final = folder / replaced.name.removeprefix(REPLACED)
        if defect(replaced, checksums=False) is not None:
            continue
        if final.exists() and defect(final, checksums=False) is not None:
            final = folder / replaced.name
        if not final.exists():
            os.rename(replaced, final)


def _stepped_aside(lane: Path) -> list[Path]:
    """Checkpoints that were moved into a lane, or into a lane inside it."""
    try:
        entries = list(lane.iterdir())
    except OSError:  # the lane was moved by another attempt
        return []
    below = [path for path in entries if path.name.startswith((WRITING, DELETING))]
    found = [
        path for path in entries if path.name.startswith(REPLACED) and _NAME.fullmatch(path.name)
    ]
    return found + [path for each in below for path in _stepped_aside(each)]


def newest_committed(
    folder: str | Path,
    *,
    checksums: bool = True,
    also: Callable[[Path], str | None] = lambda path: None,
) -> Search:
    """Find the newest complete checkpoint; without ``checksums`` only sizes are compared.

    A folder that is incomplete or damaged, or for which ``also`` returns a reason, is skipped.

    Raises:
        CheckpointError: ``folder`` cannot be listed.
    """
    folder, skipped = Path(folder), []
    named = _latest(folder)
    if named is not None:
        places = (folder / named, folder / (REPLACED + named))
        if not any(path.is_dir() for path in places):
            skipped.append((folder / named, f"the file {LATEST} names it, but it does not exist"))
    for path in candidates(folder):
        problem = defect(path, checksums=checksums) or also(path)
        if problem is None:
            return Search(path, tuple(skipped))
        skipped.append((path, problem))
    return Search(None, tuple(skipped))


def was_committed(path: Path) -> bool:
    """Return whether a skipped folder was committed, so that it was damaged later."""
    return os.path.lexists(path / COMMITTED) or _latest(path.parent) == path.name


def uncommitted(folder: Path) -> list[Path]:
    """List renamed folders without COMMITTED: left by a crash, or by a save in progress."""
    found = [path for path in candidates(folder) if not path.name.startswith(REPLACED)]
    return [
        path for path in found if (path / MANIFEST).exists() and not (path / COMMITTED).exists()
    ]


def defect(path: Path, *, checksums: bool = True) -> str | None:
    """Return why a checkpoint folder is invalid; None when it is complete and unchanged.

    A read that fails for a moment is repeated.
    """

    def read() -> str | None:
        try:
            return _defect(path, checksums=checksums)
        except FileNotFoundError as error:  # it was deleted or renamed meanwhile
            return f"it cannot be read: {error}"

    try:
        return read_again(read)
    except OSError as error:
        return f"it cannot be read: {error}"


def _defect(path: Path, *, checksums: bool) -> str | None:
    """Like ``defect``, reading once. Raises OSError."""
    try:
        if not (path / COMMITTED).is_file():
            return f"it has no {COMMITTED}: it was not committed"
        if not (path / MANIFEST).is_file():
            return f"{MANIFEST} is missing"
        text = (path / MANIFEST).read_text()
        if (path / COMMITTED).read_text().strip() != _digest(text):
            return f"{COMMITTED} does not belong to {MANIFEST}"
        return difference(path, json.loads(text)["files"], checksums=checksums)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} or {COMMITTED} is malformed: {type(error).__name__}: {error}"


def difference(
    path: Path, entries: dict[str, dict[str, int | str]], *, checksums: bool
) -> str | None:
    """Return the first difference between files and manifest, or None."""
    for name, entry in entries.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size_bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size_bytes']}"
    if checksums:
        with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
            digests = pool.map(_file_digest, (path / name for name in entries))
            for name, digest in zip(entries, digests, strict=True):
                if digest != entries[name]["sha256"]:
                    return f"{name} is damaged: its SHA-256 is not that of {MANIFEST}"
    return None


def recoverable(folder: str | Path, keep_last: int, *, committed: Path | None = None) -> list[Path]:
    """Return the ``keep_last`` newest complete checkpoints, newest first.

    Only sizes are compared, except for checkpoints newer than ``committed``, which the caller has
    just written: the resume skipped those, so they may have damage that sizes do not show.
    """
    trusted = None if committed is None else step_of(committed)
    complete = (
        path
        for path in candidates(Path(folder))
        if defect(path, checksums=trusted is not None and step_of(path) > trusted) is None
    )
    return list(itertools.islice(complete, keep_last))


def prune(
    folder: str | Path,
    keep_last: int,
    *,
    keep_every: int | None = None,
    lane: Path | None = None,
    committed: Path | None = None,
) -> tuple[Path, ...]:
    """Delete old checkpoints and leftovers of crashes; returns the deleted paths.

    Keeps the ``keep_last`` newest complete checkpoints (see ``recoverable``), those of every
    ``keep_every``-th step, all folders newer than these, and folders of other programs. With a
    ``lane`` it keeps all lanes. Without a complete checkpoint nothing is deleted.

    Call it after the commit of ``committed``, and never while a checkpoint is written without a
    lane.
    """
    assert keep_last >= 1, keep_last
    folder = Path(folder)
    kept = recoverable(folder, keep_last, committed=committed)
    if not kept:
        return ()
    oldest = step_of(kept[-1])
    in_place = [path for path in candidates(folder) if path.parent == folder]
    old = [path for path in in_place if path not in kept and step_of(path) <= oldest]
    old = [path for path in old if _is_ours(path)]
    if keep_every is not None:
        archived = [path for path in old if step_of(path) % keep_every == 0]
        whole = [path for path in archived if defect(path, checksums=False) is None]
        # of two folders of a step the first is kept, the one in place
        archive = {step_of(path): path for path in reversed(whole)}
        old = [path for path in old if path not in archive.values()]
    # an unknown lane belongs to a concurrent claim
    prefixes = (DELETING,) if lane is not None else (WRITING, DELETING)
    leftovers = [path for path in folder.iterdir() if path.name.startswith(prefixes)]
    for path in old + leftovers:
        _delete(path, lane)
    return tuple(old + leftovers)


def _is_ours(path: Path) -> bool:
    """Return whether rlpost wrote a folder: the manifest is written before the rename."""
    return (path / MANIFEST).exists() or (path / COMMITTED).exists()


def foreign(folder: Path) -> list[Path]:
    """List folders of other programs with names of checkpoints; they are never used or deleted.

    Raises:
        CheckpointError: ``folder`` cannot be listed.
    """
    return [path for path in candidates(folder) if not _is_ours(path)]


def candidates(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, including replaced ones in lanes.

    Of equal steps the folder in place comes first. The folder that ``latest`` names is looked up by
    name, because a cached directory listing may lack it.
    """
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list checkpoints in {folder}: {error}") from error
    folders = [folder / name for name in names | {_latest(folder) or ""} if _NAME.fullmatch(name)]
    for name in names:
        if name.startswith(WRITING):
            folders += _stepped_aside(folder / name)
    folders = [path for path in folders if path.is_dir()]
    return sorted(folders, key=lambda path: (-step_of(path), path.name.startswith(REPLACED)))


def _latest(folder: Path) -> str | None:
    try:
        name = (folder / LATEST).read_text().strip()
    except (OSError, ValueError):
        return None
    return name if _NAME.fullmatch(name) else None


def _seal(writing: Path) -> str:
    """Flush every file and folder, write the manifest and return its text."""
    files = sorted(path for path in writing.rglob("*") if path.is_file() and path.name != MANIFEST)
    if not files:
        raise CheckpointError(f"{writing} is empty; write the checkpoint before committing it")
    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
        digests = list(pool.map(_file_digest, files))
    entries = {
        str(file.relative_to(writing)): {"size_bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, digests, strict=True)
    }
    for file in files:
        sync(file)
    for path in sorted(path for path in writing.rglob("*") if path.is_dir()):
        sync(path)
    manifest = json.dumps({"files": entries}, indent=1) + "\n"
    write_durably(writing / MANIFEST, manifest)
    return manifest


def set_aside(path: Path, into: Path | None = None) -> Path | None:
    """Rename a folder so that it is no longer found as a checkpoint or written to.

    ``prune`` deletes it, unless it was moved ``into`` a lane, which only the owner of the lane
    changes.

    Returns:
        The new path; None if the folder did not exist.
    """
    if path.name.startswith(DELETING):
        return path
    aside = (into or path.parent) / f"{DELETING}{path.name.lstrip('.')}-{secrets.token_hex(4)}"
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return None
    return aside


def _delete(path: Path, lane: Path | None = None) -> None:
    """Rename, then delete, so that no partial folder looks like a checkpoint.

    With a ``lane`` the folder is moved into it.
    """
    aside = set_aside(path, into=lane)
    if aside is not None:
        # Before its files: after a power loss the old name must not have only some of them.
        sync(path.parent)
        shutil.rmtree(aside)


def write_durably(path: Path, text: str, *, beside: Path | None = None) -> None:
    """Replace a small file atomically and durably.

    The temporary file is in the same folder, or in ``beside`` on the same file system.
    """
    temporary = (beside or path.parent) / f".{path.name}.tmp"
    write_atomic(path, text, mode=0o666, through=temporary)


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
