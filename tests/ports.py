"""Ports of this machine for the servers of a test."""

from __future__ import annotations

import random
import socket

_DICE = random.SystemRandom()  # tests that run at the same time must not throw the same


def free_ports(count: int) -> list[int]:
    """Different ports that nobody holds, below those that the system hands to outgoing connections
    meanwhile.
    """
    found: list[int] = []
    while len(found) < count:
        port = _DICE.randint(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
