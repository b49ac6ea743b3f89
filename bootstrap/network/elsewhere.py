"""Drop RDMA ports whose network interface is in another network namespace: the host's or another
container's.

Input: facts, candidate ports, a function for a port's link layer. Output: the remaining ports, and
warnings. RoCE resolves peers through an interface's addresses, so a port without an interface here
is unusable. With SR-IOV, a container sees all virtual functions under /sys/class/infiniband but
only its own interfaces. Invariant: no port is dropped if the list of interfaces may be incomplete,
as in a pasted layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bootstrap.network.facts import NetworkFacts, RdmaPort
from bootstrap.network.narrowing import Narrowing

_WITHOUT_INTERFACE = {"erdma"}
"""Drivers whose devices are separate PCI functions, for which sysfs shows no interface."""

LinkLayer = Callable[[NetworkFacts, RdmaPort], str | None]


def drop_elsewhere(
    facts: NetworkFacts, ports: Narrowing[RdmaPort], warnings: list[str], link_layer: LinkLayer
) -> None:
    """Drop Ethernet ports without a visible interface, unless none would remain."""
    if not facts.interfaces_complete:
        return
    away = [
        port
        for port in ports.left
        if link_layer(facts, port) == "Ethernet" and not _has_interface(facts, port)
    ]
    if not away:
        return
    where = "is in another network namespace (SR-IOV?) or is missing"
    if len(away) < len(ports.left):
        ports.keep(lambda port: port not in away, f"its interface {where}")
        remedy = "left out; if they are this job's, give the container their interfaces or the host's network"
    else:
        remedy = "kept, for there are no others; RoCE may not connect: give the container the host's network"
    warnings.append(f"RDMA ports whose network interface {where}: {_listed(away)}; {remedy}")


def _has_interface(facts: NetworkFacts, port: RdmaPort) -> bool:
    """Whether its interface is visible, or a macvlan above (address in the GID table)."""
    if facts.interface(port.netdev) is not None or port.driver in _WITHOUT_INTERFACE:
        return True
    return any(facts.owner(gid.addr) is not None for gid in port.gids)


def _listed(ports: Sequence[RdmaPort]) -> str:
    return ", ".join(f"{port.name} ({port.netdev})" if port.netdev else port.name for port in ports)
