"""Addresses of servers as text: an IPv6 address has brackets before its port.

Input: a host name or IP address, and a port. Output: ``HOST:PORT`` or a URL. And this host's own
address, as its routes choose it, and connections that end when the other host vanishes.
"""

from __future__ import annotations

import ipaddress
import os
import socket

ANYWHERE, ANYWHERE_6 = "192.0.2.1", "2001:db8::1"
"""Addresses of no host (RFC 5737 and 3849), so their route is the default one."""


def bracketed(host: str) -> str:
    """Return a host as it precedes a port.

    >>> bracketed("fd00::1"), bracketed("10.0.0.1")
    ('[fd00::1]', '10.0.0.1')
    """
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``.

    >>> host_port("10.0.0.1", 80), host_port("fd00::1", 80), host_port("n01", 80)
    ('10.0.0.1:80', '[fd00::1]:80', 'n01:80')
    """
    return f"{bracketed(host)}:{port}"


def http_url(host: str, port: int) -> str:
    """Return the URL of a server.

    >>> http_url("::1", 30000)
    'http://[::1]:30000'
    """
    return f"http://{host_port(host, port)}"


def local_address(peer: str) -> str:
    """Return this host's address on the route to ``peer``; sends nothing. Raises OSError."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # discard (RFC 863); any port would do
        return str(probe.getsockname()[0])


def node_address() -> str:
    """Return the address by which other nodes reach this one: that of its name in Slurm.

    On the default route if that name has none, or only a loopback address, as Debian writes into
    /etc/hosts. Raises OSError if there is no such route.
    """
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        answers = []
    for text in (str(answer[4][0]) for answer in answers):
        address = ipaddress.ip_address(text.partition("%")[0])
        if not (address.is_loopback or address.is_link_local):
            return text
    try:
        return local_address(ANYWHERE)
    except OSError:
        return local_address(ANYWHERE_6)


NUM_PROBES = 3  # without an answer, before a connection fails


def keep_alive(connection: socket.socket, *, idle_s: int = 10, interval_s: int = 5) -> None:
    """Fail the connection ``idle_s + interval_s * NUM_PROBES`` seconds after the last answer."""
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, NUM_PROBES)
    # Keepalive probes only an idle connection; this bounds the wait for acknowledgements.
    give_up_ms = 1000 * (idle_s + interval_s * NUM_PROBES)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, give_up_ms)
