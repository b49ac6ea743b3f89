"""Read the file of an image: a wrong path is wrong data, a fault of the storage is not."""

from __future__ import annotations

import errno
import time
from pathlib import Path

from common.files import read_regular
from rlpost.errors import ImageError
from rlpost.images.limits import LIMITS

OF_THE_PATH = (
    *(errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG),
    errno.EOVERFLOW,  # ``read_regular``: too large
    *(errno.EINVAL, errno.ENXIO),  # it is not a regular file
)
"""Errors that say what the path is; another attempt gets the same one."""
MOST_SHOWN = 300
"""Characters of a path in a message: base64 without ``data:`` is read as a path, too."""
PAUSES_S = (0.1, 1.0, 4.0)
"""Before further attempts: NFS returns ESTALE or EIO while a server restarts."""


def read_file(path: Path) -> bytes:
    """Return the bytes of an image's file.

    Raises:
        ImageError: there is no such file, or it is too large or not regular.
        OSError: the storage failed in every attempt.
    """
    pauses, shown = iter(PAUSES_S), str(path)
    if len(shown) > MOST_SHOWN:
        shown = f"{shown[:MOST_SHOWN]}..."
    while True:
        try:
            return read_regular(path, LIMITS.max_bytes)
        except ValueError as error:
            raise ImageError(f"{shown}: cannot be read: {error}") from error
        except OSError as error:
            if error.errno in OF_THE_PATH:
                raise ImageError(f"{shown}: cannot be read: {error.strerror}") from error
            pause = next(pauses, None)
            if pause is None:
                raise
            time.sleep(pause)
