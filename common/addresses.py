"""Addresses of servers as text: an IPv6 address has brackets before its port.

Input: a host name or IP address, and a port. Output: ``HOST:PORT`` or a URL.
"""

from __future__ import annotations


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
