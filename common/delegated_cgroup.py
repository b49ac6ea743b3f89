"""The cgroup v2 of this process, if it is delegated: whether it may be divided for sandboxes.

Input: /proc and the cgroup file system. Output: the folder to divide, or why there is none. Reads
only; ``rlpost.extensions.agents.sandbox.cgroup`` divides it.

A cgroup counts as delegated when a normal user may write it (a service manager or an administrator
delegated it to that user), or when it has systemd's mark. Without the mark, root could write every
cgroup, those that Slurm manages included.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids")
"""Controllers that sandboxes need; ``cpu`` is used if available."""
LEAF = "rlpost-main"
"""Name of the child cgroup that gets the earlier processes of a divided one."""
MARKS = ("user.delegate", "trusted.delegate")  # extended attributes; "1" (systemd.exec, Delegate=)


@dataclass(frozen=True)
class Delegated:
    """``folder``: the cgroup to divide, or None; ``why``: the reason for None."""

    folder: Path | None
    why: str = ""


def delegated_cgroup(proc: Path = Path("/proc/self"), *, user: int | None = None) -> Delegated:
    """Find the delegated cgroup v2 of this process. Never raises.

    Args:
        proc: the process's folder below /proc.
        user: its user id; default: the effective one.
    """
    try:
        mount = _mount_point((proc / "mounts").read_text())
        path = _own_path((proc / "cgroup").read_text())
        if mount is None or path is None:
            return Delegated(None, "no cgroup v2 is mounted")
        folder = mount / path.lstrip("/")
        if folder.name == LEAF:
            folder = folder.parent
        has = (folder / "cgroup.controllers").read_text().split()
    except OSError as error:
        return Delegated(None, f"cgroup v2 cannot be read: {error}")
    missing = [name for name in CONTROLLERS if name not in has]
    if missing:
        return Delegated(None, f"cgroup v2 at {folder} has no controller {', '.join(missing)}")
    files = (folder, folder / "cgroup.procs", folder / "cgroup.subtree_control")
    is_ours = all(os.access(path, os.W_OK) for path in files)
    if is_ours and (os.geteuid() if user is None else user) == 0:
        is_ours = _is_marked(folder)
    if not is_ours:
        return Delegated(None, f"cgroup v2 at {folder} is not delegated")
    return Delegated(folder)


def _mount_point(mounts: str) -> Path | None:
    for line in mounts.splitlines():
        fields = line.split()  # device, mount point, type, ...
        if len(fields) > 2 and fields[2] == "cgroup2":
            return Path(fields[1])
    return None


def _own_path(cgroups: str) -> str | None:
    """Return the path after ``0::``, the entry of cgroup v2."""
    for line in cgroups.splitlines():
        if line.startswith("0::"):
            return line[3:]
    return None


def _is_marked(folder: Path) -> bool:
    for name in MARKS:
        try:
            if os.getxattr(folder, name) == b"1":
                return True
        except OSError:
            continue
    return False
