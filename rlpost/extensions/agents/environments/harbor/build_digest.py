"""The digest of a folder from which an image is built; it is part of the image's name."""

from __future__ import annotations

import hashlib
import os
import stat
from functools import lru_cache
from pathlib import Path


def folder_digest(folder: Path) -> str:
    """Return 8 hex digits of the names and contents of all files below a folder.

    Links are not followed. Contents are read again when a name, size or time of change is another.
    Raises OSError.
    """
    root = Path(os.path.realpath(folder))
    status = [(path, path.lstat()) for path in sorted(root.rglob("*"))]
    stamps = tuple(
        (str(path), each.st_mode, each.st_size, each.st_mtime_ns) for path, each in status
    )
    return _digest(str(root), stamps)


@lru_cache(4096)
def _digest(root: str, stamps: tuple[tuple[str, int, int, int], ...]) -> str:
    total = hashlib.sha256()
    for path, mode, *_ in stamps:
        content = b""
        if stat.S_ISREG(mode):
            content = Path(path).read_bytes()
        elif stat.S_ISLNK(mode):
            content = os.fsencode(os.readlink(path))
        name = os.fsencode(os.path.relpath(path, root))
        for part in (name, content):
            total.update(b"%d:" % len(part) + part)
    return total.hexdigest()[:8]
