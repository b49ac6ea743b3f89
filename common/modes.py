"""Modes of files outside the run folder: those that the user's umask and the parent folder give.

The processes of a job have the umask 077, because run folders are private. What a run writes
elsewhere (exported weights) is for other readers: it gets the modes that a process with the user's
umask would have given it, the setgid bit and the default ACL of the parent folder included.
Python 3.6 and later, because batch hosts use it.
"""

import errno
import os
import re
import stat
import struct
from pathlib import Path
from typing import Dict, Optional

PRIVATE = 0o077
USER_UMASK = "RLPOST_UMASK"
"""Variable with the umask of the submitting shell, in octal digits; set in a job."""
DEFAULT_ACL = "system.posix_acl_default"
_ENTRIES_AT = 4  # include/uapi/linux/posix_acl_xattr.h: a version, then tag, perm and id of each
_ENTRY = struct.Struct("<HHI")
_USER, _GROUP, _MASK, _OTHER = 0x01, 0x04, 0x10, 0x20
_NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems whose modes are those of the mount (CIFS, some FUSE file systems)."""


def become_private() -> None:
    """Set the umask 077 for this process, and remember the user's umask for its children."""
    previous = os.umask(PRIVATE)
    os.environ.setdefault(USER_UMASK, f"{previous:03o}")


def user_umask() -> int:
    """Return the umask of the user: of the submitting shell in a job, otherwise of this process."""
    stated = os.environ.get(USER_UMASK, "")
    if re.fullmatch("[0-7]{1,4}", stated):
        return int(stated, 8) & 0o777
    # os.umask can only be read by setting it, which other threads would notice
    line = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.M)
    return PRIVATE if line is None else int(line.group(1), 8)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents with the modes of ``follow_umask``. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _set_mode(folder, user_umask())


def follow_umask(folder: Path) -> None:
    """Give a folder, and all files in it, the modes of new ones of the user. Raises OSError."""
    umask = user_umask()
    _set_mode(folder, umask)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            _set_mode(path, umask)


def acl_mode(acl: bytes) -> int:
    """Return the permissions that a default ACL, as the kernel's xattr, gives to a new folder."""
    permissions: Dict[int, int] = {}
    for tag, permission, _ in _ENTRY.iter_unpack(acl[_ENTRIES_AT:]):
        permissions[tag] = permission
    # Where an ACL has a mask, the group's bits of the mode are the mask.
    group = permissions.get(_MASK, permissions[_GROUP])
    return permissions[_USER] << 6 | group << 3 | permissions[_OTHER]


def _set_mode(path: Path, umask: int) -> None:
    status = path.stat()
    acl = _default_acl(path.parent)
    mode = 0o777 & ~umask if acl is None else acl_mode(acl)
    if stat.S_ISDIR(status.st_mode):
        mode |= status.st_mode & stat.S_ISGID  # mkdir inherits it from the parent
    else:
        mode &= 0o666
    if mode == stat.S_IMODE(status.st_mode):
        return
    try:
        path.chmod(mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def _default_acl(folder: Path) -> Optional[bytes]:
    """The default ACL of a folder; None if it has none, and where there are no ACLs."""
    try:
        return os.getxattr(str(folder), DEFAULT_ACL)
    except OSError:
        return None
