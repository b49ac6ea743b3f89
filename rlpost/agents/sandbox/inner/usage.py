"""Resource usage of a sandbox's processes, read from its own /proc by its first process."""

from __future__ import annotations

import os
from dataclasses import dataclass

PAGE = os.sysconf("SC_PAGESIZE")
TICKS = os.sysconf("SC_CLK_TCK")
# A Unix socket holds up to net.core.wmem_default of data that belongs to no process.
UNIX_SOCKET = 208 * 1024
FREE_SOCKETS = 512


@dataclass(frozen=True)
class ProcessUsage:
    """All processes except the first: number, resident bytes, CPU seconds of those alive."""

    processes: int
    resident: int
    cpu_seconds: float


def measure() -> ProcessUsage:
    """Read the usage of all processes. Shared pages count once for each process."""
    count = resident = ticks = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        values = _stat(name)
        if values is None:
            continue
        count += 1
        resident += values[1] * PAGE
        ticks += values[0]
    return ProcessUsage(count, resident, ticks / TICKS)


def _stat(pid: str) -> tuple[int, int] | None:
    """Return CPU ticks (children included) and resident pages of a process, unless it ended."""
    text = _read(f"/proc/{pid}/stat")
    if text is None:
        return None
    # the name of the program may contain spaces and brackets
    values = text[text.rindex(b")") + 2 :].split()
    return sum(int(value) for value in values[11:15]), int(values[21])


def memory(usage: ProcessUsage, limit: int) -> int:
    """Return bytes in use; exact, with shared pages once, when the cheap sum is over ``limit``."""
    sockets = socket_memory()
    if usage.resident + sockets <= limit:
        return usage.resident + sockets
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            total += _proportional(name)
    return total + sockets


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
    """Return bytes that Unix sockets beyond the first FREE_SOCKETS may hold."""
    text = _read("/proc/net/unix") or b""
    return max(0, text.count(b"\n") - FREE_SOCKETS) * UNIX_SOCKET


def _read(path: str) -> bytes | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while data := os.read(handle, 1 << 16):
            parts.append(data)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(handle)
