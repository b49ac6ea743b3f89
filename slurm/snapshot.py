"""Snapshot of the code at submission in RUN/code; RUN/code.json describes it.

Input: the project folder. Output: a copy of its tracked, modified and new files, without ignored
ones; or of its packages if the project is not a git checkout.

Invariant: ``target`` appears atomically.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import write_atomic
from slurm.errors import SnapshotError

PACKAGES = ("rlpost", "bootstrap", "slurm", "common", "jobs")


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """Facts about a copy. ``commit`` is None outside git and before the first commit."""

    commit: str | None
    is_dirty: bool
    num_files: int


def snapshot_code(source: Path, target: Path) -> CodeSnapshot:
    """Replace ``target`` with a copy of the code below ``source``; write its facts to TARGET.json.

    Raises:
        SnapshotError: git cannot list the files, or there is no code.
    """
    snapshot = _copy_all(source, target)
    write_atomic(target.with_name(f"{target.name}.json"), json.dumps(asdict(snapshot)) + "\n")
    return snapshot


def _copy_all(source: Path, target: Path) -> CodeSnapshot:
    source, target = source.resolve(), target.absolute()
    in_git = (source / ".git").exists()
    paths = _git_files(source) if in_git else _package_files(source)
    # Exclude the run's folder, which holds its checkpoints.
    own = target if target.parent == source else target.parent
    paths = [path for path in paths if not (source / path).is_relative_to(own)]
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
    for path in paths:
        num_files += _copy(source / path, beside / path)
    if target.exists():
        target.rename(old)  # removal takes seconds, during which a job may start
    beside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    commit = _git_line(source, "rev-parse", "--verify", "--quiet", "HEAD") if in_git else None
    return CodeSnapshot(
        commit, in_git and bool(_git_line(source, "status", "--porcelain")), num_files
    )


def _copy(file: Path, to: Path) -> int:
    """Copy one entry of git's list; return the number of files."""
    if not file.is_symlink() and not file.exists():
        return 0  # deleted, and the deletion is not committed
    if file.is_dir() and not file.is_symlink():  # a nested repository, or an empty submodule folder
        return _copy_all(file, to).num_files if (file / ".git").exists() else 0
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(file, to, follow_symlinks=False)
    return 1


def _git_files(source: Path) -> list[Path]:
    command = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    try:
        done = subprocess.run(command, capture_output=True)
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


def _git_line(source: Path, *arguments: str) -> str | None:
    done = subprocess.run(_git(source, *arguments), capture_output=True, text=True)
    return done.stdout.strip() or None


def _git(source: Path, *arguments: str) -> list[str]:
    """git's command line.

    git rejects a checkout that another user owns, such as a site-wide one, unless it is a
    safe.directory. The user who submits runs this code, and so trusts it.
    """
    return ["git", "-c", f"safe.directory={source}", "-C", str(source), *arguments]
