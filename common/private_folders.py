"""Folders below /tmp that only this user can enter, although anyone can take their names first.

Programs load code and open sockets in such folders, so one of another user is never used: a folder
with a random name takes its place. ``own_folder`` is for folders that outlive a job, ``new_folder``
for those of one job.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path


def is_private(path: Path) -> bool:
    """Whether ``path`` is a folder, not a link, of this user that no other user can enter."""
    status = path.lstat()
    is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return is_own and stat.S_ISDIR(status.st_mode)


def own_folder(path: Path) -> Path:
    """Return a private folder: ``path``, which may exist, or a new one if it is not private.

    Raises OSError.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not is_private(path):
            return _elsewhere(path)
    return path


def new_folder(path: Path) -> Path:
    """Return an empty private folder: ``path``, or a new one if another user has taken the name.

    A folder that this user left there is removed. Raises OSError.
    """
    try:
        status = path.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            return _elsewhere(path)
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:  # taken in this moment
        return _elsewhere(path)
    return path


def _elsewhere(path: Path) -> Path:
    # The name is cut, because sockets inside have paths of at most 107 bytes.
    return Path(tempfile.mkdtemp(prefix=f"{path.name[:12]}-", dir=path.parent))
