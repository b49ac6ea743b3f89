"""System calls that Python has no function for, through ctypes; errors are OSError."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import socket
import struct

NEW_NS, NEW_CGROUP, NEW_UTS = 0x00020000, 0x02000000, 0x04000000
NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
NEW_TIME = 0x80
NEW_ANY = NEW_NS | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_USER | NEW_PID | NEW_NET | NEW_TIME

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_RECURSIVE, AT_FDCWD = 0x8000, -100

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
# system calls without a glibc wrapper in old releases; the numbers of pivot_root differ
MACHINE = platform.machine()
NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(MACHINE, -1)
NR_CAPSET = {"x86_64": 126, "aarch64": 91}.get(MACHINE, -1)
NR_MOUNT_SETATTR = 442
_OCTAL = re.compile(rb"\\([0-7]{3})")  # mountinfo has \040 for a blank

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount ``source``; an empty ``kind`` passes no file system type, as for bind mounts."""
    _check(
        libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            os.fsencode(options) or None,
        ),
        f"mount {kind or 'bind'} {source} on {target}",
    )


def unmount(target: str) -> None:
    """Detach a mount and all below it."""
    _check(libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root of this mount namespace; the previous one moves to ``old``."""
    result = libc.syscall(NR_PIVOT_ROOT, os.fsencode(new), os.fsencode(old))
    _check(result, f"pivot_root {new}")


def restrict_mount(target: str, attributes: int) -> None:
    """Set attributes (ATTR_*) on a mount and all mounts below it."""
    request = struct.pack("QQQQ", attributes, 0, 0, 0)
    result = libc.syscall(
        NR_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, request, len(request)
    )
    if result == 0:
        return
    # Before Linux 5.12: one remount for each mount, which must repeat the flags that it has.
    # MOUNT_ATTR_RDONLY, NOSUID and NODEV equal MS_RDONLY, NOSUID and NODEV.
    with open("/proc/self/mountinfo", "rb") as file:
        mountinfo = file.read()
    for path in mounts_below(target, mountinfo):
        flags = MS_REMOUNT | MS_BIND | (os.statvfs(path).f_flag & 0xF) | (attributes & 7)
        mount("none", path, "", flags)


def mounts_below(target: str, mountinfo: bytes) -> list[str]:
    """Return the mount points at and below ``target``, from /proc/PID/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        escaped = line.split()[4]
        path = os.fsdecode(_OCTAL.sub(lambda code: bytes([int(code[1], 8)]), escaped))
        if path == target or path.startswith(target.rstrip("/") + "/"):
            found.append(path)
    return found


def prctl(option: int, value: int = 0) -> int:
    """Call prctl with one argument; the others are 0."""
    zero = ctypes.c_ulong(0)
    return _check(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def drop_capabilities() -> None:
    """Drop all capabilities of this process and of all programs that it executes."""
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        last = int(file.read())
    for capability in range(last + 1):
        prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
    _check(libc.syscall(NR_CAPSET, header, bytes(24)), "capset")


def bring_loopback_up() -> None:
    """Bring up the interface ``lo`` of this network namespace."""
    SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP_RUNNING))
