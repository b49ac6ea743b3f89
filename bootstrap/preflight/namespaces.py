"""Try the namespaces of a sandbox: ``python -m bootstrap.preflight.namespaces``.

Output: nothing and exit code 0 if this node can isolate commands without privileges; else the
reason on standard output and exit code 1. Namespaces and mounts disappear with the process. It is
a separate process, because a process with threads cannot enter a user namespace.
"""

from __future__ import annotations

import ctypes
import os
import sys

_NEW_USER = 0x10000000
# mounts, cgroups, host name, IPC, processes, network
_OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_PRIVATE = 1 << 18 | 16384  # MS_PRIVATE | MS_REC


def main() -> int:
    """Enter namespaces and mount a file system in them; return the exit code."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    steps = (
        ("user namespaces", lambda: libc.unshare(_NEW_USER)),
        ("mapping of users", lambda: _map(user, group)),
        ("namespaces", lambda: libc.unshare(_OTHERS)),
        ("mounts", lambda: libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None)),
        ("tmpfs", lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None)),
    )
    for name, step in steps:
        try:
            failed = step() != 0 and os.strerror(ctypes.get_errno())
        except OSError as error:
            failed = str(error)
        if failed:
            print(f"{name}: {failed}")
            return 1
    return 0


def _map(user: int, group: int) -> int:
    """Map this user into the new namespace, as a process without privileges may."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"1000 {user} 1"),
        ("gid_map", f"1000 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
