"""Pointers of git LFS: small text files that stand for a file that was not downloaded."""

from __future__ import annotations

from pathlib import Path

_FIRST_LINE = b"version https://git-lfs.github.com/spec/"


def pointer_problem(path: Path) -> str | None:
    """Return that a file is a pointer of git LFS, with the remedy; None if it is not.

    Raises OSError.
    """
    with path.open("rb") as file:
        if file.read(len(_FIRST_LINE)) != _FIRST_LINE:
            return None
    return (
        f"{path}: is a pointer of git LFS instead of the file itself; run `git lfs install` and "
        f"`git lfs pull` in {path.parent}, or download the file from its page"
    )
