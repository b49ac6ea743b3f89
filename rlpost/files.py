"""Files that outlive a crash of the machine, whole. Standard library alone.

``slurm`` and ``bootstrap`` know nothing of this package and have their own; so has ``checkpoint.commit``, whose tests
crash it between any two calls of the system.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, texts: Iterable[str]) -> None:
    """Put texts, one after the other, at ``path``: a reader sees the file that was there or the whole new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)
