"""Ports of this machine for the servers of a test."""

from __future__ import annotations

import random
import socket

_RANDOM = random.SystemRandom()  # concurrent tests must not draw the same ports


def free_ports(count: int) -> list[int]:
    """Return different unused ports, below the ephemeral range: the system gives none of them to an
    outgoing connection.
    """
    found: list[int] = []
    while len(found) < count:
        port = _RANDOM.randint(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def free_port() -> int:
    """Return one unused port."""
    return free_ports(1)[0]
