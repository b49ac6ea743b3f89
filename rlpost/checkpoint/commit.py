"""The commit protocol: how a folder full of files becomes a checkpoint, all of it or none. Pure file work.

    begin    .writing-iter_0000020/         writers of all ranks fill it
    commit   every file flushed, MANIFEST.json with size and SHA-256 of each
             rename to iter_0000020/        an older one of the same step steps aside as .replaced-iter_0000020/
             COMMITTED inside               from here on it counts
             latest                         names it, for people; a commit does without
    prune    after the commit: older ones go

In: a folder on a file system whose rename is atomic; one process at a time commits into it. ``ownership``
sees to that: its writers work in a lane, ``.writing-TOKEN/.writing-iter_0000020/``. All that a writer with a
lane does to names outside it is a rename out of the lane or into it, so that nothing happens once a newer
attempt has taken the lane away; what it writes inside its folder goes through a descriptor of that folder,
wherever its name has gone. Invariant: whatever the instant of a crash, ``newest_committed`` finds the newest
checkpoint that was complete, with the bytes that were written, and the next ``begin`` works. The order
(write, fsync the file, rename, fsync the folder) is that of Pillai et al., All File Systems Are Not Created
Equal, OSDI 2014. Bad storage while reading is a reason to skip a checkpoint, never an exception; while
writing it is an OSError, after which the checkpoint before is still there.
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

from rlpost.errors import CheckpointError
from rlpost.files import sync, write_whole, write_within

logger = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
COMMITTED = "COMMITTED"
LATEST = "latest"
OWNER = "OWNER"
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


def begin(folder: str | Path, step: int, *, lane: Path | None = None) -> Path:
    """A new empty folder to write the checkpoint of ``step`` into, in ``folder`` or in a lane of it, which must exist.

    Leftovers of an earlier save of the step, and all in the lane, are removed: they may be what fills the disk. What
    cannot be removed yet (a file that an older attempt holds open on NFS) stays until the next time.
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
                logger.warning("%s is not removed yet: %s", leftover, error)
    os.mkdir(writing, 0o700)
    return writing


def commit(writing: Path, *, check: Callable[[], None] = lambda: None) -> Path:
    """Make what lies in ``writing``, a folder from ``begin``, the checkpoint of its step. Returns its final path.

    All writers must have finished. ``check`` is called just before the rename and may raise. Raises CheckpointError for
    an empty folder, or where another program's checkpoint has the name; OSError when the storage fails; then the
    checkpoint before is the newest.
    """
    lane = writing.parent if writing.parent.name.startswith(WRITING) else None
    folder = writing.parent if lane is None else lane.parent
    final = folder / writing.name.removeprefix(WRITING)
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
        # By descriptor: another attempt's folder may have the name by now, and its marker must not be ours.
        write_within(descriptor, COMMITTED, _digest(manifest) + "\n")
    finally:
        os.close(descriptor)
    check()  # where the folder was taken away before it was marked, it is no checkpoint
    _name_latest(folder, lane, final.name)
    if replaced is not None:
        _delete(replaced, lane)
    return final


def _step_aside(final: Path, lane: Path | None, *, is_complete: bool) -> Path | None:
    """Make the name ``final`` free; of a complete checkpoint where it is now."""
    if not final.exists():
        return None
    if is_complete:
        replaced = (final.parent if lane is None else lane) / (REPLACED + final.name)
        if replaced.exists():
            _delete(replaced, lane)
        os.rename(final, replaced)
        sync(replaced.parent)  # before its old name is gone for good: a loss of power must leave it one of the two
        return replaced
    if not _is_ours(final):
        raise CheckpointError(
            f"{final} is there and no save of this program wrote it (Megatron names checkpoints so, too); move it "
            "away or give another --save"
        )
    _delete(final, lane)
    return None


def _name_latest(folder: Path, lane: Path | None, name: str) -> None:
    """Write ``latest``; a checkpoint is one without it."""
    try:
        write_durably(folder / LATEST, name + "\n", beside=lane)
    except OSError as error:
        logger.warning("%s is committed, but %s does not name it: %s", folder / name, folder / LATEST, error)


def rescue(folder: Path, lane: Path) -> None:
    """Give a complete checkpoint that stepped aside into ``lane``, or into one below it, its name back where no
    complete one has that: the save that was to replace it was interrupted."""
    for replaced in _stepped_aside(lane):
        final = folder / replaced.name.removeprefix(REPLACED)
        if defect(replaced, checksums=False) is not None:
            continue
        if final.exists() and defect(final, checksums=False) is not None:
            final = folder / replaced.name
        if not final.exists():
            os.rename(replaced, final)


def _stepped_aside(lane: Path) -> list[Path]:
    """Checkpoints that stepped aside into a lane, or into one that was put into it."""
    try:
        entries = list(lane.iterdir())
    except OSError:  # taken away meanwhile
        return []
    below = [path for path in entries if path.name.startswith((WRITING, DELETING))]
    found = [path for path in entries if path.name.startswith(REPLACED) and _NAME.fullmatch(path.name)]
    return found + [path for each in below for path in _stepped_aside(each)]


def newest_committed(
    folder: str | Path, *, checksums: bool = True, also: Callable[[Path], str | None] = lambda path: None
) -> Search:
    """The newest complete checkpoint in ``folder``; without ``checksums`` only sizes are compared.

    A folder that is incomplete or damaged, or against which ``also`` has a reason, is skipped, with the reason, and the
    next older one is tried. Raises CheckpointError when the folder cannot be listed.
    """
    folder, skipped = Path(folder), []
    named = _latest(folder)
    if named is not None and not any((folder / (aside + named)).is_dir() for aside in ("", REPLACED)):
        skipped.append((folder / named, f"the file {LATEST} names it, but it is not there"))
    for path in _candidates(folder):
        problem = defect(path, checksums=checksums) or also(path)
        if problem is None:
            return Search(path, tuple(skipped))
        skipped.append((path, problem))
    return Search(None, tuple(skipped))


def was_committed(path: Path) -> bool:
    """Whether a folder that ``newest_committed`` skipped counted once: something happened to it since."""
    return os.path.lexists(path / COMMITTED) or _latest(path.parent) == path.name


def uncommitted(folder: Path) -> list[Path]:
    """Folders in place that a save wrote and did not come to mark: of a crash, or of somebody who still writes."""
    found = [path for path in _candidates(folder) if not path.name.startswith(REPLACED)]
    return [path for path in found if (path / MANIFEST).exists() and not (path / COMMITTED).exists()]


def defect(path: Path, *, checksums: bool = True) -> str | None:
    """Why a checkpoint folder does not count, in words; None when it is complete and as it was written."""
    try:
        for name in (COMMITTED, MANIFEST):
            if not (path / name).is_file():
                return f"it has no {name}: it was not committed" if name == COMMITTED else f"{name} is missing"
        text = (path / MANIFEST).read_text()
        if (path / COMMITTED).read_text().strip() != _digest(text):
            return f"{COMMITTED} does not belong to {MANIFEST}"
        return _difference(path, json.loads(text)["files"], checksums=checksums)
    except OSError as error:
        return f"it cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} or {COMMITTED} is malformed: {type(error).__name__}: {error}"


def _difference(path: Path, entries: dict[str, dict[str, int | str]], *, checksums: bool) -> str | None:
    """The first file that is not as the manifest says, in words."""
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


def recoverable(folder: str | Path, keep_last: int, *, committed: Path | None = None) -> list[Path]:
    """The ``keep_last`` newest complete checkpoints, newest first.

    Only sizes are compared, but of those that are newer than ``committed``, which the caller has just written: why a
    resume did not begin from them is damage that no size shows.
    """
    trusted = None if committed is None else step_of(committed)
    complete = (
        path
        for path in _candidates(Path(folder))
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
    """Delete all but the ``keep_last`` newest complete checkpoints and those of every ``keep_every``-th step, and
    leftovers of crashes; who has a ``lane`` leaves all lanes alone. Returns what was deleted.

    Call it after a commit, that of ``committed``, and never while a checkpoint is being written without a lane. Which
    are complete: ``recoverable``. A folder newer than those kept is left alone, complete or not, and so is one that no
    save of ours wrote; with no complete checkpoint nothing is deleted.
    """
    assert keep_last >= 1, keep_last
    folder = Path(folder)
    kept = recoverable(folder, keep_last, committed=committed)
    if not kept:
        return ()
    oldest = step_of(kept[-1])
    in_place = [path for path in _candidates(folder) if path.parent == folder]
    old = [path for path in in_place if path not in kept and step_of(path) <= oldest]
    old = [path for path in old if _is_ours(path)]
    if keep_every is not None:
        whole = (path for path in old if step_of(path) % keep_every == 0 and defect(path, checksums=False) is None)
        archive = {step_of(path): path for path in reversed(list(whole))}  # of one step the one in place
        old = [path for path in old if path not in archive.values()]
    doomed = (DELETING,) if lane is not None else (WRITING, DELETING)  # an unknown lane is of one who claims just now
    leftovers = [path for path in folder.iterdir() if path.name.startswith(doomed)]
    for path in old + leftovers:
        _delete(path, lane)
    return tuple(old + leftovers)


def _is_ours(path: Path) -> bool:
    """Whether a save of this program wrote a folder: each has its manifest before it gets its name."""
    return (path / MANIFEST).exists() or (path / COMMITTED).exists()


def foreign(folder: Path) -> list[Path]:
    """Folders with names of checkpoints that no save of this program wrote: nothing resumes from them or removes them.

    Raises CheckpointError when the folder cannot be listed.
    """
    return [path for path in _candidates(folder) if not _is_ours(path)]


def _candidates(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first; of one step the one in place before those that stepped aside, in lanes too.

    The one that ``latest`` names is looked up by name: a listing from a cache may lack it.
    """
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be looked for in {folder}: {error}") from error
    found = [folder / name for name in names | {_latest(folder) or ""} if _NAME.fullmatch(name)]
    for name in names:
        if name.startswith(WRITING):
            found += _stepped_aside(folder / name)
    found = [path for path in found if path.is_dir()]
    return sorted(found, key=lambda path: (-step_of(path), path.name.startswith(REPLACED)))


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
        raise CheckpointError(f"{writing} holds no file; write the checkpoint before committing it")
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
    """Rename a folder so that nobody takes it for a checkpoint or finds it to write to; ``prune`` deletes it, unless it
    was put ``into`` a lane, which only its owner touches.

    Returns where it is now, None when it was gone.
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
    """Remove a folder such that a half-removed one is never taken for a checkpoint, and by way of the ``lane``."""
    aside = set_aside(path, into=lane)
    if aside is not None:
        shutil.rmtree(aside)


def write_durably(path: Path, text: str, *, beside: Path | None = None) -> None:
    """Replace a small file by one with this text, all of it or nothing, on disk when this returns.

    The text is written first to a file in the same folder, or ``beside`` it in another one of the same file system.
    """
    write_whole(path, [text], through=(beside or path.parent) / f".{path.name}.tmp")


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
