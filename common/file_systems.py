"""The file system of a path, by the text of /proc/mounts. Pure: nothing of the path is touched,
because a file system whose server is gone would block the caller.
"""

from __future__ import annotations

import re

# Network file systems by the beginnings of their names in /proc/mounts.
REMOTE = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "9p",
    "wekafs",
    "fuse.",
    "afs",
    "panfs",
)
# Images of containers, mounted by enroot without root.
LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.squashfuse")
_OCTAL = re.compile(r"\\([0-7]{3})")  # /proc/mounts has \040 for a blank


def mount_of(path: str, mounts: str) -> str | None:
    """Type of the file system that holds an absolute path, from the text of /proc/mounts."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), fields[1])
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and (best is None or len(point) >= best[0]):  # a later mount hides an earlier one
            best = (len(point), fields[2])
    return best[1] if best else None


def is_remote(kind: str | None) -> bool:
    """Whether a type of file system is one of a network; False for an unknown one."""
    return kind is not None and kind.startswith(REMOTE) and not kind.startswith(LOCAL_FUSE)
