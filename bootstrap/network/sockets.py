"""Select the interface for sockets: the one over which the nodes of the job reach each other.

In a job the choice is made in ``published_addresses``: each node connects to the first address of
the head that answers (``bootstrap.agent.rendezvous``), and both ends of this connection have their
interface. ``choose_socket`` then only names it.

Input: facts, the user's setting, the connection that reached the head. Output: interface, address,
reasons, warnings. Outside a job (``python -m bootstrap.network``) there is no connection, and the
answer is the list of addresses to which other nodes would try to connect.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from bootstrap.network.network_facts import Interface, NetworkFacts, address_of, network_of


@dataclass(frozen=True, slots=True)
class Address:
    """One address of this machine, IPv4 or IPv6 (without a zone)."""

    ifname: str
    ip: str


def published_addresses(
    facts: NetworkFacts, addresses: Iterable[Address], ifname: str | None = None
) -> tuple[Address, ...]:
    """Addresses of this node to which the others may try to connect.

    Those of ``ifname``, if the user names one. Otherwise neither loopback nor link-local, and not of
    a bridge for containers or virtual machines of this node alone (``docker0`` has the same address
    everywhere), unless there are no others.
    """
    reachable = [address for address in addresses if _may_be_reached(address)]
    if ifname:
        return tuple(address for address in reachable if address.ifname == ifname)
    within_node = {
        one.name
        for one in facts.interfaces
        if one.type == "bridge" and not facts.is_wired(one) and one.name != facts.default_route
    }
    outside = [one for one in reachable if one.ifname.partition(":")[0] not in within_node]
    return tuple(outside or reachable)


def _may_be_reached(address: Address) -> bool:
    ip = ipaddress.ip_address(address.ip)
    return not ip.is_loopback and not ip.is_link_local


@dataclass(slots=True)
class SocketChoice:
    """The interface and its address (None if unknown), with reasons and warnings."""

    ifname: str | None = None
    ip: str | None = None
    why: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def choose_socket(
    facts: NetworkFacts, override: str | None = None, connection_ip: str | None = None
) -> SocketChoice:
    """Select the interface for sockets.

    Args:
        override: interface that the user selected; used unchecked.
        connection_ip: local address of the established connection to the head.
    """
    choice = SocketChoice()
    if override:
        choice.ifname = override
        choice.why.append(f"{override}: named by the user")
        if facts.interface(override) is None:
            choice.warnings.append(
                f"{override} was named by the user and is not among the interfaces of this host"
            )
    elif connection_ip and (owner := facts.owner(connection_ip)):
        choice.ifname, choice.ip = owner.name, connection_ip
        choice.why.append(
            f"{owner.name}: holds {connection_ip}, the local end of the connection to the head"
        )
    else:
        choice.why.append(_without_connection(facts))
        if connection_ip:
            choice.warnings.append(
                f"--connection-ip {connection_ip} is no address of this host's interfaces and does "
                "not count; use one of those listed"
            )
    chosen = facts.interface(choice.ifname)
    if chosen is not None:
        choice.ip = choice.ip or _first_address(chosen)
        _warn_about(facts, chosen, choice)
    return choice


def _without_connection(facts: NetworkFacts) -> str:
    """Say to which addresses of this host the nodes of a job would try to connect."""
    addresses = [
        Address(one.name, str(address_of(text)))
        for one in facts.interfaces
        if one.state != "down"
        for text in one.addresses
    ]
    published = published_addresses(facts, addresses)
    listed = ", ".join(f"{one.ifname}={one.ip}" for one in published) or "none"
    return (
        "in a job the connection to the head decides, or --socket-ifname; the others would try these "
        f"addresses of this host: {listed}"
    )


def _first_address(one: Interface) -> str | None:
    """The interface's first address that other hosts can use, IPv4 first."""
    # A /32 in addition to a connected network is a virtual address, which may move to another host.
    whole = sorted(one.routable, key=lambda text: (":" in text, text.endswith("/32")))
    return next((str(address_of(text)) for text in whole), None)


def _warn_about(facts: NetworkFacts, one: Interface, choice: SocketChoice) -> None:
    if one.type == "loopback" and choice.ip and not address_of(choice.ip).is_loopback:
        choice.warnings.append(
            f"the node's address {choice.ip} is on {one.name}: libraries that skip loopback need it named"
        )
    if one.state == "down":
        choice.warnings.append(f"{one.name} is down")
    if not one.routable and not one.is_unlisted and one.type != "loopback":
        choice.warnings.append(f"{one.name} has no address that another host could use")
    if not facts.is_wired(one) and one.type not in ("veth", "loopback"):
        choice.warnings.append(
            f"{one.name} is a {one.type}: nodes reach each other, but not at the speed of the wire"
        )
    peers = [
        other.name for other in facts.interfaces if other is not one and _shares_network(one, other)
    ]
    if peers:
        choice.warnings.append(
            f"{', '.join(peers)} and {one.name} are on one network: the kernel may answer on another than was asked "
            "(arp_filter, rp_filter)"
        )


def _shares_network(one: Interface, other: Interface) -> bool:
    if other.state == "down" or other.type == "loopback":
        return False
    networks = {
        network
        for text in one.routable
        if (network := network_of(text)) and network.num_addresses > 1
    }
    return any(network_of(text) in networks for text in other.routable)
