"""Atomic and durable writes, reads of files that another host writes, and private folders.
Invariant: a reader on any node sees no file, the old file or the complete new one, also after a
crash. Python 3.6 and later, because batch hosts use it.
"""

import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterable, Optional, Union

REFUSES_FOLDERS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF})
"""Errors of file systems without fsync of a folder (CIFS, some FUSE file systems)."""
MAX_READ_BYTES = 1 << 28
"""Of a file that is read as a whole: above what a run writes, below what exhausts a login node."""
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def sync(path: Path) -> None:
    """Fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            sync_names(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: int) -> None:
    """Fsync an open folder; do nothing where the file system does not support that."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in REFUSES_FOLDERS:
            raise


def write_atomic(
    path: Path,
    text: Union[str, Iterable[str]],
    *,
    mode: int = 0o600,
    through: Optional[Path] = None,
) -> None:
    """Replace ``path`` with a text, or the parts of one: write, fsync, rename, fsync the folder.

    ``mode`` is subject to the umask. ``through`` is the temporary file, on the same file system;
    the default is a new file beside ``path``. Raises OSError and leaves ``path`` unchanged then.
    """
    beside = _write_beside(path, text, mode=mode, through=through)
    try:
        os.replace(beside, path)
    except BaseException:
        discard(beside)
        raise
    sync(path.parent)


def write_first(path: Path, text: str) -> bool:
    """Create ``path`` (0600) unless it exists; return whether this call created it."""
    beside = _write_beside(path, text)
    try:
        return take_name(beside, path)
    finally:
        discard(beside)


def take_name(beside: Path, path: Path) -> bool:
    """Give the file ``beside`` the name ``path`` unless a file has it; return whether it was given.

    The caller removes ``beside``, which may still exist.

    link(2) fails if the name exists, also on NFS; rename does not. If NFS loses the reply and
    retries the request, a successful link returns EEXIST: a link count above 1 identifies this
    case. On a file system without hard links, an empty file reserves the name and a rename replaces
    it.
    """
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
    return True


def write_within(folder: int, name: str, text: str) -> None:
    """``write_atomic`` in an open folder, even if it was renamed since. Mode 0666."""
    temporary = f".{name}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    sync_names(folder)


def discard(path: Path) -> None:
    """Remove a file that may be missing; a file that cannot be removed stays."""
    with suppress(OSError):  # an error here must not hide an error of the caller
        path.unlink()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``; the kernel may accept less per call."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def is_there(path: Path) -> bool:
    """Whether a file exists that another host may write. Blocks while storage hangs.

    An NFS client caches "no such file" for up to acdirmax (60 s). Opening the folder makes the
    client revalidate the folder with the server (Linux, fs/nfs/dir.c, nfs_lookup_verify_inode) and
    drop that entry if the folder changed.
    """
    with suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return os.path.exists(path)  # Path.exists raises ESTALE and EIO


def tail(path: Path, num_lines: int = 20, max_bytes: int = 16_384) -> str:
    """The last lines of a log, or a message if it cannot be read or is empty."""
    try:
        lines = tail_text(path, max_bytes).splitlines()
    except OSError as error:
        return f"({path} cannot be read: {error.strerror})"
    return "\n".join(lines[-num_lines:]) if lines else f"({path} is empty)"


def full_words(error: OSError, path: Optional[Path] = None) -> str:
    """What a full file system or an exceeded quota lacks, and the remedy; else empty.

    ``path``: where it happened, if the error does not name it. ``df`` shows free bytes while no
    file can be made, so free inodes are looked up.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    place = Path(os.fsdecode(error.filename2 or error.filename or path or "."))
    if error.errno == errno.EDQUOT:
        return "remove files, or raise the quota; it may bound bytes or the number of files"
    try:
        status = os.statvfs(str(place if place.exists() else place.parent))
    except OSError:
        return "make room there"
    if status.f_files > 0 and status.f_favail == 0:
        return "no inode is free (df -i): remove files, their number is the limit, not their size"
    return "make room there, or raise the quota"


class OutsideFolder(ValueError):
    """A path that the data of others names leads out of their folder."""


def below(root: Path, path: str = ".") -> Path:
    """Return ``root / path``, which data of others names, for use.

    Raises OutsideFolder unless it is the root or below it once all links are resolved. What a link
    inside leads to is not ours to read for them: an instruction may link to the user's keys.
    """
    base, target = (Path(os.path.realpath(str(each))) for each in (root, root / path))
    if base != target and base not in target.parents:
        raise OutsideFolder(f"{path} leads to {target}, which is not below {base}")
    return root / path


def check_path(path: str) -> None:
    """Raise ValueError for a name in data of others that is not a path below its folder."""
    if not all(part not in ("", ".", "..") and "\0" not in part for part in path.split("/")):
        raise ValueError(f"path {path!r} must be relative and inside")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also for any other kind of file.

    Readers of run folders meet what others put there: a FIFO would block, a device never ends.
    """
    descriptor = os.open(str(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, also if it has more than ``max_bytes``."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EOVERFLOW, "larger than {} bytes".format(max_bytes), str(path))
    return content


def read_object(path: Path) -> Dict[str, Any]:
    """The JSON object in a file; empty if it is missing, cannot be read or holds something else."""
    try:
        content = json.loads(read_regular(path).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def tail_text(path: Path, max_bytes: int) -> str:
    """The last ``max_bytes`` bytes of a file. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
        return file.read(max_bytes).decode(errors="replace")


def tail_or_empty(path: Path, max_bytes: int) -> str:
    """``tail_text``; empty if the file is missing or cannot be read."""
    try:
        return tail_text(path, max_bytes)
    except OSError:
        return ""


def text_or_empty(path: Path) -> str:
    """Stripped text of a file; empty if it is missing or cannot be read."""
    try:
        return read_regular(path).decode(errors="replace").strip()
    except OSError:
        return ""


def _write_beside(
    path: Path,
    text: Union[str, Iterable[str]],
    *,
    mode: int = 0o600,
    through: Optional[Path] = None,
) -> Path:
    """Write and fsync a temporary file; return its path. Removes the file on errors."""
    beside = through or path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    # A file with a fixed name may remain from a crash; a random name must be new.
    exists = os.O_EXCL if through is None else os.O_TRUNC
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | exists, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        discard(beside)
        raise
    return beside


def is_private(path: Path) -> bool:
    """Whether ``path`` is a folder, not a link, of this user that no other user can enter."""
    status = path.lstat()
    is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return is_own and stat.S_ISDIR(status.st_mode)


def own_folder(path: Path) -> Path:
    """Return a private folder: ``path``, which may exist, or a new one if it is not private.

    Programs load code and open sockets in it, and below /tmp anyone can take its name first. For
    folders that outlive a job; ``new_folder`` is for those of one job.
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
