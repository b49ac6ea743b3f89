"""Which interface reaches the other nodes: read off the connection that forms the cluster, never guessed by name.

Comes in: the local address of an accepted connection. Goes out: the interface that owns it and the environment that
makes Gloo, NCCL, TensorPipe and NVSHMEM use that interface. Names may differ from node to node.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

# Ray replaces 127.0.0.1 and localhost by the address of some interface (ray.util.get_node_ip_address); the rest of
# 127/8 is loopback just as well and is left alone, so a one-node cluster can stay off the network.
LOOPBACK_IP = "127.0.0.2"
LOOPBACK_IFNAME = "lo"


class NetworkError(Exception):
    """An address or an interface is not what it has to be."""


@dataclass(frozen=True, slots=True)
class Address:
    """One IPv4 address of this machine."""

    ifname: str
    ip: str


def local_addresses() -> tuple[Address, ...]:
    """IPv4 addresses of all interfaces that are up."""
    stats = psutil.net_if_stats()
    return tuple(
        Address(ifname, address.address)
        for ifname, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and ifname in stats and stats[ifname].isup
    )


def reachable_addresses(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """Those that another machine might reach: neither loopback nor link-local."""

    def may_be_reached(address: Address) -> bool:
        ip = ipaddress.ip_address(address.ip)
        return not ip.is_loopback and not ip.is_link_local

    return tuple(address for address in addresses if may_be_reached(address))


def ifname_of(ip: str, addresses: Iterable[Address]) -> str:
    """The interface that owns ``ip``.

    Raises:
        NetworkError: none does, for instance behind address translation; names those there are.
    """
    known = tuple(addresses)
    if ipaddress.ip_address(ip).is_loopback:
        return LOOPBACK_IFNAME
    for address in known:
        if address.ip == ip:
            return address.ifname
    listed = ", ".join(f"{address.ifname}={address.ip}" for address in known)
    raise NetworkError(f"no interface owns {ip} (there are: {listed}); name the right one with --socket-ifname")


def ip_of(ifname: str, addresses: Iterable[Address]) -> str:
    """The first address of an interface that the user named.

    Raises:
        NetworkError: there is no such interface with an IPv4 address; names those there are.
    """
    known = tuple(addresses)
    for address in known:
        if address.ifname == ifname:
            return address.ip
    listed = ", ".join(sorted({address.ifname for address in known}))
    raise NetworkError(f"--socket-ifname {ifname}: this host has no such interface with an IPv4 address ({listed})")


def socket_environment(ifname: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to ``environ`` so that collectives use ``ifname``; a variable the user has set is left alone.

    Gloo and TensorPipe take a bare device name. NCCL, and NVSHMEM which copied its parser, take a prefix unless it
    begins with ``=`` (NCCL user guide, NCCL_SOCKET_IFNAME): a bare ``eth1`` would match ``eth10`` as well.
    """
    wanted = {
        "GLOO_SOCKET_IFNAME": ifname,
        "TP_SOCKET_IFNAME": ifname,
        "NCCL_SOCKET_IFNAME": f"={ifname}",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": f"={ifname}",
    }
    return {key: value for key, value in wanted.items() if not environ.get(key)}
