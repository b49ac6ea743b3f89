"""Ports of this machine for the servers of a test.

A port is drawn some time before a server listens at it, and must stay free until then. So these
ports are outside the kernel's range for outgoing connections and the range of the product's jobs,
and each is locked against the other test processes on this machine.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

NUM_LOCKED = 500  # of one process; the port that it drew first is free again for the next
_RANDOM = random.SystemRandom()  # processes that start together must not draw the same ports
_LOCKS = Path(tempfile.gettempdir()) / f"ports-of-tests.{os.getuid()}"
_locked: list[int] = []


def free_ports(count: int) -> list[int]:
    """Return different ports at which nothing listens, locked for this process."""
    drawn = _free_ports()
    return [next(drawn) for _ in range(count)]


def free_port() -> int:
    """Return one port at which nothing listens, locked for this process."""
    return free_ports(1)[0]


def _free_ports() -> Iterator[int]:
    ports = _unclaimed_ports()
    while True:
        port = ports[_RANDOM.randrange(len(ports))]
        if port in _locked or not _lock(port):
            continue
        _locked.append(port)
        if len(_locked) > NUM_LOCKED:
            fcntl.lockf(_file(), fcntl.LOCK_UN, 1, _locked.pop(0))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


def _unclaimed_ports() -> range:
    """The ports above the kernel's range for outgoing connections, or, where these are few, below
    those of the product's jobs (common/port_blocks.py).
    """
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[1])
    above = range(highest + 1, 65536)
    return above if len(above) >= 4 * NUM_LOCKED else range(2_000, 10_000)


def _lock(port: int) -> bool:
    """Lock the port's byte of the file; a lock ends with its process, also when that is killed."""
    try:
        fcntl.lockf(_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _file() -> int:
    global _descriptor
    if _descriptor is None:
        _descriptor = os.open(_LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return _descriptor


_descriptor: int | None = None
