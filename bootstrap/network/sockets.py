"""Select the interface for sockets: the one over which the nodes of the job reach each other.

In a job the choice is made in ``published_addresses``: each node connects to the first address of
the head that answers (``bootstrap.agent.rendezvous``), and both ends of this connection have their
interface. ``choose_socket`` then only names it.

Input: facts, the user's setting, the connection that reached the head. Output: interface, address,
reasons, warnings. Criteria in order of precedence: the user's setting, the connection; outside a job
(``python -m bootstrap.network``) the address under which Slurm knows the node, the route to a peer,
the default route, then heuristics (addresses, medium, rate). Names only break the last tie, so that
the result does not depend on the order of a listing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from bootstrap.network.narrowing import Narrowing
from bootstrap.network.network_facts import Interface, NetworkFacts, address_of, network_of

# Assumed prefix length of an address whose prefix length is unknown.
_USUAL_PREFIX = {4: 24, 6: 64}
# RFC 1918, RFC 6598 (carriers and overlays), RFC 4193.
_PRIVATE_BLOCKS = tuple(
    ipaddress.ip_network(block)
    for block in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)


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
        choice.ifname = _by_evidence(facts, choice)
    chosen = facts.interface(choice.ifname)
    if chosen is not None:
        choice.ip = choice.ip or _address_for_peers(facts, chosen)
        _warn_about(facts, chosen, choice)
    elif choice.ifname is None:
        choice.warnings.append("no interface is known that could carry sockets")
    return choice


def _by_evidence(facts: NetworkFacts, choice: SocketChoice) -> str | None:
    usable = tuple(one for one in facts.interfaces if _is_usable(one))
    candidates: Narrowing[Interface] = Narrowing(usable, choice.why)
    if facts.slurm_addr and (owner := facts.owner(facts.slurm_addr)) and owner.state != "down":
        choice.why.append(
            f"{owner.name}: holds {facts.slurm_addr}, the address under which Slurm knows this node"
        )
        return owner.name
    loopback = next(
        (one for one in facts.interfaces if one.type == "loopback" and one.routable), None
    )
    # a pod's veth is its wire
    wires = [one for one in usable if facts.is_wired(one) or one.type == "veth"]
    if loopback and not any(one.routable or one.is_unlisted for one in wires):
        choice.why.append(
            f"{loopback.name}: holds the only routable address (an unnumbered, routed fabric)"
        )
        return loopback.name
    if not facts.example_peer:
        # A job's traffic uses Slingshot; the default route leads to the management network.
        candidates.keep(
            lambda one: facts.is_slingshot(one) and bool(one.routable), "not on Slingshot"
        )
    _follow_routes(facts, candidates)
    _prefer_likely(facts, candidates)
    if not candidates.left:
        return None
    choice.why.append(
        f"{candidates.left[0].name}: the most likely of {len(usable)} that could carry sockets"
    )
    return candidates.left[0].name


def _is_usable(one: Interface) -> bool:
    """Whether sockets can use an interface; a bond's or bridge's member needs an address (VRF)."""
    return (
        one.type != "loopback"
        and one.state != "down"
        and (one.master is None or bool(one.routable))
    )


def _follow_routes(facts: NetworkFacts, candidates: Narrowing[Interface]) -> None:
    """Prefer the longest connected prefix towards a peer, else the default route."""
    reach = {one.name: _reach(facts, one) for one in candidates.left}
    if any(reach.values()):
        candidates.keep_best(lambda one: reach[one.name], "not the closest route to the peers")
        return
    source = facts.owner(facts.source_towards_peer) if facts.source_towards_peer else None
    if source is not None and source in candidates.left:
        # Interfaces of container networks (CNI) have single addresses, perhaps near the peer's.
        candidates.keep(
            lambda one: one is source, f"the kernel reaches {facts.example_peer} from {source.name}"
        )
        return
    bits = {one.name: _common_bits(facts, one) for one in candidates.left}
    if any(bits.values()):
        candidates.keep_best(lambda one: bits[one.name], "its address is farther from the peers'")
        return
    route = facts.interface(facts.default_route)
    if route is None or route not in candidates.left or not (route.routable or route.is_unlisted):
        return
    wired = [one for one in candidates.left if facts.is_wired(one)]
    private = [one for one in wired if any(map(_is_internal, one.routable))]
    is_public = route.routable and not any(map(_is_internal, route.routable))
    if is_public and private and not facts.example_peer:
        names = ", ".join(one.name for one in private)
        candidates.keep(
            lambda one: one in private,
            f"{route.name} leads to the internet, {names} has a private address",
        )
        return
    candidates.keep(
        lambda one: one is route or _is_faster_twin(one, route),
        f"the default route leaves through {route.name}",
    )


def _is_faster_twin(one: Interface, route: Interface) -> bool:
    """Whether ``one`` shares the default route's network and is known to be faster."""
    return _shares_network(route, one) and (one.speed_mbps or 0) > (route.speed_mbps or 0) > 0


def _reach(facts: NetworkFacts, one: Interface) -> int:
    """Prefix length of the network that the interface shares with the peer; 0 if there is none."""
    if facts.example_peer is None:
        return 0
    lengths = [0]
    peer = address_of(facts.example_peer)
    # Directly connected hosts may have 169.254 addresses only; equal fe80 networks prove nothing.
    by_cable = peer.version == 4 and peer.is_link_local
    for text in (one.ipv4 or ()) if by_cable else one.routable:
        address, network = address_of(text), network_of(text)
        if peer.version != address.version:
            continue
        if network is None:
            network = ipaddress.ip_network((address, _USUAL_PREFIX[address.version]), strict=False)
        if peer in network:
            lengths.append(network.prefixlen)
    return max(lengths)


def _common_bits(facts: NetworkFacts, one: Interface) -> int:
    """Leading bits in common with the peer, if not in a connected network.

    Overlays and clouds assign single addresses (/32, /128) and route the rest. Without a known
    default route, an address of unknown prefix length is treated in the same way. 0 in all other
    cases.
    """
    if facts.example_peer is None or one.type == "dummy" or not one.routable:
        return 0
    networks = [network_of(text) for text in one.routable]
    if any(network is not None and network.num_addresses > 1 for network in networks):
        return 0
    if None in networks and facts.default_route:
        return 0
    peer = address_of(facts.example_peer)
    blocks = [block for block in _PRIVATE_BLOCKS if block.version == peer.version and peer in block]
    if not blocks:
        return 0
    near = [address_of(text) for text in one.routable if address_of(text) in blocks[0]]
    return max(
        (peer.max_prefixlen - (int(peer) ^ int(address)).bit_length() for address in near),
        default=0,
    )


def _prefer_likely(facts: NetworkFacts, candidates: Narrowing[Interface]) -> None:
    candidates.keep(
        lambda one: bool(one.routable or one.is_unlisted),
        "has no address that another host could use",
    )
    candidates.keep(facts.is_wired, "tunnel, overlay or bridge without a physical link")
    candidates.keep(
        lambda one: facts.is_wired(one) or one.type == "veth",
        "beside the wire of a container (veth)",
    )
    candidates.keep(lambda one: bool(one.routable), "its addresses are not known")
    candidates.keep(lambda one: one.state == "up", "not known to be up")
    candidates.keep_best(
        lambda one: _rate_mbps(facts, one), "slower than another with the same claim"
    )
    candidates.keep(
        lambda one: one.name == facts.default_route,
        "another with the same claim has the default route",
    )
    candidates.keep(lambda one: one.type != "vlan", "a VLAN on top of another with the same claim")
    candidates.keep_best(lambda one: one.mtu or 0, "smaller MTU")
    candidates.left = tuple(sorted(candidates.left, key=_last_resort))


def _last_resort(one: Interface) -> tuple[int, int, str, str]:
    addresses = [address_of(text) for text in one.routable]
    first = min(((address.version, int(address)) for address in addresses), default=(9, 0))
    return (*first, one.pci or "", one.name)


def _rate_mbps(facts: NetworkFacts, one: Interface) -> float:
    rates = [
        port.rate_gbps * 1000
        for port in facts.rdma_ports
        if port.netdev == one.name and port.rate_gbps
    ]
    return max([one.speed_mbps or 0, *rates])


def _is_internal(text: str) -> bool:
    """Whether the address is in a range for internal use (RFC 1918, RFC 6598, RFC 4193)."""
    return not address_of(text).is_global


def _address_for_peers(facts: NetworkFacts, one: Interface) -> str | None:
    """The interface's address on the peers' network, else its first routable one (IPv4 first)."""
    if facts.slurm_addr and facts.owner(facts.slurm_addr) is one:
        return str(address_of(facts.slurm_addr))
    near = [text for text in one.addresses if _reach(facts, Interface(one.name, ipv4=(text,)))]
    # A /32 in addition to a connected network is a virtual address, which may move to another host.
    whole = sorted(one.routable, key=lambda text: (":" in text, text.endswith("/32")))
    return next((str(address_of(text)) for text in (*near, *whole)), None)


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
