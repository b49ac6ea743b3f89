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
from pathlib import Path

from common.files import sync, take_name, write_all

logger = logging.getLogger(__name__)


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
    """Create a file with these records atomically. Raises FileExistsError when it exists.

    Without hard links, a crash may leave an empty file: a segment without records, which ends the
    chain.
    """
    partial = _partial_path(path)
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for record in records:
                write_all(file, record)
            os.fsync(file)
        finally:
            os.close(file)
        if not take_name(partial, path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def _partial_path(path: Path) -> Path:
    """Return a random temporary name: process ids are not unique on a shared file system."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    return path.with_name(f".{path.name}.{host}.{os.getpid()}.{secrets.token_hex(4)}")
