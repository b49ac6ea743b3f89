"""Atomic writes of the attempt files that other processes read.

Invariant: a reader on any node sees no file or the complete file. Files are created with mode 0600.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def write_atomic(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, replacing what was there (write beside it, fsync, rename)."""
    os.replace(_write_beside(path, text), path)


def write_first(path: Path, text: str) -> bool:
    """Put ``text`` at ``path`` unless somebody did before; True when this call did.

    link(2) fails when the name exists, on NFS as well, which rename cannot promise. A request whose answer was lost is
    sent again, and then its own success is answered with EEXIST: the number of links tells. Where there are no hard
    links the name is taken by an empty file first, which a rename then fills.
    """
    beside = _write_beside(path, text)
    try:
        os.link(beside, path)
    except FileExistsError:
        return os.stat(beside).st_nlink > 1
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return True


def tail(path: Path, num_lines: int = 20, max_bytes: int = 16_384) -> str:
    """The last lines of a log; what is wrong with it when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({path} cannot be read: {error.strerror})"
    return "\n".join(lines[-num_lines:]) if lines else f"({path} is empty)"


def _write_beside(path: Path, text: str) -> Path:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        beside.unlink()
        raise
    return beside
