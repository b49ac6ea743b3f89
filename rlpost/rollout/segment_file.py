"""Atomic creation of journal segments, without replacing an existing file, on any file system.

Input: a path and the first records of the segment. Output: the file, on disk. If two attempts of a
run are alive on two hosts, exactly one of them creates the segment of a given number.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from common.files import sync

logger = logging.getLogger(__name__)

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


def make_folder(folder: Path) -> None:
    """Create the folder of the journal and remove temporary files of earlier attempts.

    A storage failure is only logged; creating the first segment reports it again.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        sync(folder.parent)  # otherwise a host crash may lose the folder with its synced content
        for left in folder.glob(".*.log.*"):
            left.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("journal: %s", error)


def create(path: Path, records: Iterable[bytes]) -> None:
    """Create a file with these records atomically. Raises FileExistsError when it exists."""
    partial = _partial_path(path)
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for record in records:
            write_all(file, record)
        os.fsync(file)
        _put_in_place(partial, path, os.fstat(file))
    finally:
        os.close(file)
        partial.unlink(missing_ok=True)
    sync(path.parent)


def _partial_path(path: Path) -> Path:
    """Return a random temporary name: process ids are not unique on a shared file system."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    return path.with_name(f".{path.name}.{host}.{os.getpid()}.{secrets.token_hex(4)}")


def _put_in_place(partial: Path, path: Path, made: os.stat_result) -> None:
    """Give the file ``made`` at ``partial`` the name ``path``.

    Raises FileExistsError when another file has it.

    A hard link never replaces a file. NFS may repeat a request whose answer was lost, and answer
    the repeated one with EEXIST: then the file there is this one. Where there are no hard links the
    name is taken by an empty file, which only one process can create; a rename then puts the
    segment in its place. A crash between the two leaves the empty file: a segment without records,
    behind which nothing follows.
    """
    try:
        os.link(partial, path)
    except FileExistsError:
        if not _is_same_file(path, made):
            raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError as taken:
            raise FileExistsError(
                taken.errno, taken.strerror, str(partial), None, str(path)
            ) from None
        os.rename(partial, path)


def _is_same_file(path: Path, made: os.stat_result) -> bool:
    """Return whether ``path`` is the file ``made``; opens it, because NFS revalidates at each
    open.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.path.samestat(os.fstat(descriptor), made)
        finally:
            os.close(descriptor)
    return False


def write_all(file: int, data: bytes) -> None:
    """Write all of ``data``; the kernel may accept less per call."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
