"""Resource usage of a sandbox's processes, read from its own /proc by its first process."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

PAGE = os.sysconf("SC_PAGESIZE")
TICKS = os.sysconf("SC_CLK_TCK")
# A Unix socket holds up to net.core.wmem_default of data that belongs to no process.
BUFFER_SIZE, UNIX_SOCKET = "/proc/sys/net/core/wmem_default", 208 * 1024
FREE_SOCKETS = 512
# Memory of a file lock belongs to no process either. Reading /proc/locks stops all locking on the
# node meanwhile and takes time that grows with the square of its length: some 5,000 locks are read.
LOCKS_BYTES, LOCKS_SECONDS = 1 << 18, 2.0


@dataclass(frozen=True)
class ProcessUsage:
    """All processes except the first.

    Attributes:
        processes: their number.
        resident: bytes; shared pages count once for each process.
        tables: bytes of page tables, which are not resident memory: reading one byte of each 2 MiB
            of an empty mapping takes 4 KiB of them and no other memory.
        cpu_seconds: of those alive.
    """

    processes: int
    resident: int
    tables: int
    cpu_seconds: float


def measure() -> ProcessUsage:
    """Read the usage of all processes."""
    count = resident = tables = ticks = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        values = _stat(name)
        if values is None:
            continue
        count += 1
        resident += values[1] * PAGE
        tables += table_memory(_read(f"/proc/{name}/status") or b"")
        ticks += values[0]
    return ProcessUsage(count, resident, tables, ticks / TICKS)


def _stat(pid: str) -> tuple[int, int] | None:
    """Return CPU ticks (children included) and resident pages of a process, unless it ended."""
    text = _read(f"/proc/{pid}/stat")
    if text is None:
        return None
    # the name of the program may contain spaces and brackets
    values = text[text.rindex(b")") + 2 :].split()
    return sum(int(value) for value in values[11:15]), int(values[21])


def table_memory(status: bytes) -> int:
    """Return the bytes of page tables in a text like /proc/PID/status; a zombie has none.

    >>> table_memory(b"VmLib:\\t 8 kB\\nVmPTE:\\t 48 kB\\n")
    49152
    """
    _, _, after = status.partition(b"\nVmPTE:")
    return int(after.split(maxsplit=1)[0]) * 1024 if after else 0


def memory(usage: ProcessUsage, limit: int) -> int:
    """Return bytes in use; exact, with shared pages once, when the cheap sum is over ``limit``.

    It is above ``limit`` also where the sandbox holds too many file locks.
    """
    if LOCKS.are_too_many():
        return limit + 1
    kernel = usage.tables + socket_memory()
    if usage.resident + kernel <= limit:
        return usage.resident + kernel
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            total += _proportional(name)
    return total + kernel


def _proportional(pid: str) -> int:
    text = _read(f"/proc/{pid}/smaps_rollup")
    if text is None:
        values = _stat(pid)
        return values[1] * PAGE if values else 0
    for line in text.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def socket_memory() -> int:
    """Return bytes that Unix sockets may hold, and that TCP and UDP sockets do hold.

    Unix sockets of the first FREE_SOCKETS x UNIX_SOCKET bytes are not counted. A sandbox cannot
    change the size of a buffer (``seccomp``); the kernel's default may be larger.
    """
    each = int(_read(BUFFER_SIZE) or UNIX_SOCKET)
    num_unix = (_read("/proc/net/unix") or b"").count(b"\n")
    total = max(0, num_unix * each - FREE_SOCKETS * UNIX_SOCKET)
    for name in ("tcp", "tcp6", "udp", "udp6"):
        total += queued(_read(f"/proc/net/{name}") or b"")
    return total


class FileLocks:
    """The sandbox's file locks: the kernel lists those of its own processes alone."""

    def __init__(self) -> None:
        self._read_at = -LOCKS_SECONDS

    def are_too_many(self) -> bool:
        """Return whether their list exceeds LOCKS_BYTES; False if it was read a moment ago."""
        now = time.monotonic()
        if now < self._read_at + LOCKS_SECONDS:
            return False
        self._read_at = now
        return len(_read("/proc/locks", LOCKS_BYTES + 1) or b"") > LOCKS_BYTES


LOCKS = FileLocks()


def queued(table: bytes) -> int:
    """Return the bytes in all queues of a table like /proc/net/tcp (proc(5)): column TX:RX, hex."""
    total = 0
    for line in table.splitlines()[1:]:
        sent, received = line.split()[4].split(b":")
        total += int(sent, 16) + int(received, 16)
    return total


def _read(path: str, limit: int = sys.maxsize) -> bytes | None:
    """Return a file's bytes, ``limit`` or few more; None if it cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts, size = [], 0
        while size < limit and (data := os.read(handle, 1 << 16)):
            parts.append(data)
            size += len(data)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(handle)
