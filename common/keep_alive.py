"""End TCP connections whose other host has vanished, by the kernel."""

from __future__ import annotations

import socket


def keep_alive(
    connection: socket.socket, *, idle_s: int = 10, interval_s: int = 5, num_probes: int = 3
) -> None:
    """Fail the connection ``idle_s + interval_s * num_probes`` seconds after the last answer."""
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, num_probes)
    # Keepalive probes only an idle connection; this bounds the wait for acknowledgements.
    give_up_ms = 1000 * (idle_s + interval_s * num_probes)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, give_up_ms)
