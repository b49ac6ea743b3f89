"""The digest of a folder from which an image is built; it is part of the image's name."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

MAX_BYTES = 8 << 30
CHUNK = 1 << 20


def folder_digest(folder: Path) -> str:
    """Return 8 hex digits of the names and contents of all files below a folder.

    Links are not followed. Contents are read again when a name, size or time of change is another.
    Raises OSError, and ValueError for files of more than MAX_BYTES together.
    """
    root = Path(os.path.realpath(folder))
    status = [(path, path.lstat()) for path in sorted(root.rglob("*"))]
    size = sum(each.st_size for _, each in status if stat.S_ISREG(each.st_mode))
    if size > MAX_BYTES:  # a sparse file needs no disk
        raise ValueError(
            f"{folder} has {size >> 20} MiB, of which the image is built; at most "
            f"{MAX_BYTES >> 20} MiB are read"
        )
    stamps = tuple(
        (str(path), each.st_mode, each.st_size, each.st_mtime_ns) for path, each in status
    )
    return _digest(str(root), stamps)


@lru_cache(4096)
def _digest(root: str, stamps: tuple[tuple[str, int, int, int], ...]) -> str:
    total = hashlib.sha256()
    for path, mode, size, _ in stamps:
        content: Iterable[bytes] = ()
        if stat.S_ISREG(mode):
            content = _chunks(Path(path), size)
        elif stat.S_ISLNK(mode):
            link = os.fsencode(os.readlink(path))
            content, size = [link], len(link)
        else:
            size = 0
        name = os.fsencode(os.path.relpath(path, root))
        total.update(b"%d:" % len(name) + name + b"%d:" % size)
        for chunk in content:
            total.update(chunk)
    return total.hexdigest()[:8]


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first ``size`` bytes of a file, in parts."""
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(CHUNK, size))):
            size -= len(data)
            yield data
