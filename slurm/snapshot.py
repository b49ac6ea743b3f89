"""Snapshot of the code at submission in RUN/code; RUN/code.json describes it.

Input: the project folder. Output: a copy of its tracked, modified and new files, without ignored
ones; or of its packages if the project is not a git checkout. A file that the newest snapshot beside
it has too is a hard link to that one: a copy takes 1,700 inodes, of which home folders have few.
Files of a snapshot are read-only, because a write would change the code of other runs.

Invariant: ``target`` appears atomically, or nothing is left of it.
"""

from __future__ import annotations

import filecmp
import json
import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import write_atomic
from slurm.errors import SnapshotError

WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
PACKAGES = ("rlpost", "bootstrap", "slurm", "common", "jobs")


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """Facts about a copy. ``commit`` is None outside git and before the first commit."""

    commit: str | None
    is_dirty: bool
    num_files: int


def snapshot_code(
    source: Path, target: Path, environ: Mapping[str, str] | None = None
) -> CodeSnapshot:
    """Replace ``target`` with a copy of the code below ``source``; write its facts to TARGET.json.

    ``environ``: of git; by default this process's.

    Raises:
        SnapshotError: git cannot list the files, or there is no code.
    """
    snapshot = _copy_all(source, target, _newest_snapshot(target.absolute()), environ)
    write_atomic(target.with_name(f"{target.name}.json"), json.dumps(asdict(snapshot)) + "\n")
    return snapshot


def _newest_snapshot(target: Path) -> Path | None:
    """Return the newest snapshot of this user beside ``target``, in a folder RUNS/RUN/code."""
    times = {}
    for facts in target.parent.parent.glob(f"*/{target.name}.json"):
        with suppress(OSError):
            status = facts.stat()
            if status.st_uid == os.geteuid():
                times[facts.with_suffix("")] = status.st_mtime_ns
    return max(times, key=times.__getitem__, default=None)


def _copy_all(
    source: Path, target: Path, earlier: Path | None, environ: Mapping[str, str] | None
) -> CodeSnapshot:
    source, target = source.resolve(), target.absolute()
    in_git = (source / ".git").exists()
    paths = _git_files(source, environ) if in_git else _package_files(source)
    # Exclude the run's folder, which holds its checkpoints.
    staging = target if target.parent == source else target.parent
    paths = [path for path in paths if not (source / path).is_relative_to(staging)]
    if not paths:
        raise SnapshotError(
            f"no code in {source}: neither files known to git nor {', '.join(PACKAGES)}"
        )
    # Fresh names: on NFS a folder stays as long as a process holds one of its files.
    for kind in ("new", "old"):
        for leftover in target.parent.glob(f".{target.name}.{kind}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    unique = secrets.token_hex(4)
    beside = target.with_name(f".{target.name}.new-{unique}")
    old = target.with_name(f".{target.name}.old-{unique}")
    beside.mkdir(mode=0o700, parents=True)
    num_files = 0
    try:
        for path in paths:
            before = earlier and earlier / path
            num_files += _copy(source / path, beside / path, before, environ)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if target.exists():
        target.rename(old)  # removal takes seconds, during which a job may start
    beside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    commit = (
        _git_line(source, environ, "rev-parse", "--verify", "--quiet", "HEAD") if in_git else None
    )
    return CodeSnapshot(
        commit, in_git and bool(_git_line(source, environ, "status", "--porcelain")), num_files
    )


def _copy(file: Path, to: Path, earlier: Path | None, environ: Mapping[str, str] | None) -> int:
    """Copy one entry of git's list, or link its ``earlier`` copy; return the number of files."""
    if not file.is_symlink() and not file.exists():
        return 0  # deleted, and the deletion is not committed
    if file.is_dir() and not file.is_symlink():  # a nested repository, or an empty submodule folder
        is_nested = (file / ".git").exists()
        return _copy_all(file, to, earlier, environ).num_files if is_nested else 0
    to.parent.mkdir(parents=True, exist_ok=True)
    if earlier is None or not _link(file, earlier, to):
        shutil.copy2(file, to, follow_symlinks=False)
        if not to.is_symlink():
            to.chmod(stat.S_IMODE(to.stat().st_mode) & ~WRITABLE)
    return 1


def _link(file: Path, earlier: Path, to: Path) -> bool:
    """Make ``to`` a hard link to ``earlier`` if that is a copy of ``file``; return whether it is.

    ``earlier`` must be a read-only regular file of this user. Its content is compared through the
    new name, which no other process can replace.
    """
    try:
        status, other = file.lstat(), earlier.lstat()
        is_fixed = other.st_uid == os.geteuid() and not other.st_mode & WRITABLE
        is_alike = status.st_mode & ~WRITABLE == other.st_mode and status.st_size == other.st_size
        if not (is_fixed and is_alike and stat.S_ISREG(other.st_mode)):
            return False
        os.link(earlier, to, follow_symlinks=False)
    except OSError:  # no hard links here, or too many of one file
        return False
    if os.path.samestat(to.lstat(), other) and filecmp.cmp(file, to, shallow=False):
        return True
    to.unlink()
    return False


def _git_files(source: Path, environ: Mapping[str, str] | None) -> list[Path]:
    command = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    try:
        done = subprocess.run(command, capture_output=True, env=environ)
    except FileNotFoundError as error:
        raise SnapshotError(
            f"{source} is a git checkout but there is no git command here; install git"
        ) from error
    if done.returncode != 0:
        raise SnapshotError(
            f"git does not list the files of {source}: {os.fsdecode(done.stderr).strip()}"
        )
    return sorted({Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name})


def _package_files(source: Path) -> list[Path]:
    """Files of the packages, and the metadata of the installation, which has the version pins."""
    files = [path for package in PACKAGES for path in (source / package).rglob("*")]
    files += source.glob("rlpost-*.dist-info/METADATA") if files else []
    kept = (path.relative_to(source) for path in files if "__pycache__" not in path.parts)
    return sorted(
        path for path in kept if not (source / path).is_dir() or (source / path).is_symlink()
    )


def _git_line(source: Path, environ: Mapping[str, str] | None, *arguments: str) -> str | None:
    command = _git(source, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    return done.stdout.strip() or None


def _git(source: Path, *arguments: str) -> list[str]:
    """git's command line.

    git rejects a checkout that another user owns, such as a site-wide one, unless it is a
    safe.directory. The user who submits runs this code, and so trusts it.
    """
    return ["git", "-c", f"safe.directory={source}", "-C", str(source), *arguments]
