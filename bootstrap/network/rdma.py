"""Select the RDMA ports for the collectives: kind, set of devices, GID index.

Input: facts and the interface that sockets use. Output: the selection, reasons, warnings.
Invariants: the set never mixes InfiniBand and Ethernet ports; a criterion that would leave no port
is ignored; device names decide nothing (a name's stem only helps to separate two groups that the
number of GPUs already separates).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from bootstrap.network.narrowing import Narrowing
from bootstrap.network.network_facts import (
    CXI_HINT,
    TCPXO_HINT,
    Gid,
    GpuLocation,
    Interface,
    NetworkFacts,
    RdmaPort,
    address_of,
)

# GPUDirect-TCPX (Google's A3 High): four NICs for the data of eight GPUs, one for all else.
_NUM_TCPX_DATA_NICS = 4
# Drivers whose devices are separate PCI functions, for which sysfs shows no interface.
_WITHOUT_INTERFACE = {"erdma"}
# The kernel lists two link-local GIDs of a port (RoCE v1, v2), then each address as v1 and v2.
_FIRST_ADDRESS_ROCE_V2, _LINK_LOCAL_ROCE_V2 = 3, 1

# If neither driver nor link layer is known, the kernel's device name may begin with the driver.
_NAMED_BY_PROVIDER = {"efa": re.compile(r"(rdma[pso]|efa_)\d"), "cxi": re.compile(r"cxi\d")}


@dataclass(slots=True)
class RdmaChoice:
    """Kind and ports.

    ``gid_index`` is common to all ports. ``gid_is_seen``: the index was read from a GID table.
    """

    kind: str = "none"
    ports: tuple[RdmaPort, ...] = ()
    excluded: tuple[RdmaPort, ...] = ()
    gid_index: int | None = None
    gid_index_per_hca: dict[str, int] = field(default_factory=dict)
    gid_is_seen: bool = False
    data_ifnames: tuple[str, ...] = ()
    why: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def choose_rdma(facts: NetworkFacts, socket_ifname: str | None) -> RdmaChoice:
    """Kind, ports and GID index for the collectives of this host."""
    choice = RdmaChoice()
    choice.warnings += [
        f"remark of the host: {hint}" for hint in facts.hints if hint.startswith("no ")
    ]
    choice.kind = _provider_kind(facts, choice)
    if choice.kind == "gpudirect-tcpx":
        choice.data_ifnames = tuple(
            sorted(one.name for one in _gvnics(facts) if one.name != socket_ifname)
        )
    elif choice.kind == "none":
        if facts.rdma_ports:
            _choose_ports(facts, socket_ifname, choice)
        else:
            _judge_without_ports(facts, choice)
    if choice.kind == "roce":
        _choose_gid(facts, choice)
    return choice


def _provider_kind(facts: NetworkFacts, choice: RdmaChoice) -> str:
    """Fabric that NCCL uses through a plug-in instead of verbs, or ``none``."""
    drivers = {one.driver for one in facts.interfaces} | {one.driver for one in facts.rdma_ports}

    def named(provider: str) -> bool:
        unknown = [
            port
            for port in facts.rdma_ports
            if port.driver is None and facts.link_layer(port) is None
        ]
        return any(_NAMED_BY_PROVIDER[provider].match(port.name) for port in unknown)

    if "efa" in drivers or named("efa"):
        choice.why.append("efa: driver efa (NCCL reaches it through libfabric, not verbs)")
        return "efa"
    if (
        any(str(driver).startswith("cxi") for driver in drivers)
        or named("cxi")
        or _has_hint(facts, CXI_HINT)
    ):
        choice.why.append("cxi: driver or libfabric provider cxi (Slingshot)")
        return "cxi"
    gvnics = _gvnics(facts)
    # Without the plug-in, more than four data NICs are ordinary NICs (A3 Mega).
    has_plug_in = _has_hint(facts, TCPXO_HINT)
    is_tcpx = len(gvnics) == _NUM_TCPX_DATA_NICS + 1 or (has_plug_in and len(gvnics) > 1)
    if is_tcpx and facts.num_gpus and not facts.rdma_ports:
        choice.why.append(
            f"gpudirect-tcpx: {len(gvnics)} gVNICs, all but one for the data of the GPUs"
        )
        return "gpudirect-tcpx"
    return "none"


def _has_hint(facts: NetworkFacts, beginning: str) -> bool:
    return any(hint.startswith(beginning) for hint in facts.hints)


def _gvnics(facts: NetworkFacts) -> list[Interface]:
    return [
        one
        for one in facts.interfaces
        if one.driver == "gve" and one.type == "ether" and one.state != "down"
    ]


def _judge_without_ports(facts: NetworkFacts, choice: RdmaChoice) -> None:
    """Decide without listed devices: interfaces may still show that there are some."""
    if any(one.type == "infiniband" for one in facts.interfaces):
        choice.kind = "ib"
        choice.why.append("ib: there are InfiniBand interfaces")
        choice.warnings.append("no RDMA device is listed; NCCL selects the devices itself")
    else:
        choice.why.append("none: no RDMA device")


def _choose_ports(facts: NetworkFacts, socket_ifname: str | None, choice: RdmaChoice) -> None:
    ports = Narrowing(facts.rdma_ports, choice.why)
    if all(_is_accelerated_networking(facts, port) for port in facts.rdma_ports):
        choice.excluded = facts.rdma_ports
        choice.why.append("none: the only RDMA port is that of Hyper-V's accelerated networking")
        return
    if all(port.state == "DOWN" for port in facts.rdma_ports):
        choice.excluded = facts.rdma_ports
        choice.warnings.append(
            f"all RDMA ports are down: {', '.join(port.name for port in facts.rdma_ports)}"
        )
        return
    if closed := [port.name for port in facts.rdma_ports if not port.is_open]:
        said = f"RDMA devices that cannot be opened: {', '.join(closed)}; give the container "
        choice.warnings.append(f"{said}/dev/infiniband, readable and writable")
    if len(closed) == len(facts.rdma_ports):
        choice.excluded = facts.rdma_ports
        return
    ports.keep(lambda port: port.is_open, "its device in /dev/infiniband cannot be opened")
    ports.keep(lambda port: port.state != "DOWN", "port is down")
    ports.keep(lambda port: port.state == "ACTIVE", "port is not known to be active")
    ports.keep(
        lambda port: not _is_accelerated_networking(facts, port),
        "Hyper-V's accelerated networking, not RDMA",
    )
    _drop_elsewhere(facts, ports, choice.warnings)
    _drop_virtual_functions(facts, ports)
    _drop_front_end(facts, ports)
    _keep_one_link_layer(facts, ports)
    _keep_one_rate(ports)
    _drop_front_end_bond(facts, ports)
    _keep_same_fabric(facts, ports, socket_ifname)
    _keep_near_gpus(facts.gpus, ports)
    _settle_surplus(facts, ports, socket_ifname)
    choice.ports = tuple(ports.left)
    choice.excluded = tuple(port for port in facts.rdma_ports if port not in choice.ports)
    layers = {facts.link_layer(port) for port in choice.ports}
    choice.kind = "ib" if layers == {"InfiniBand"} else "roce"
    choice.why.append(f"{choice.kind}: {', '.join(port.name for port in choice.ports)}")
    if layers == {None}:
        choice.warnings.append("the link layer of the RDMA ports is unknown; assuming Ethernet")
    if down := [port.name for port in facts.rdma_ports if port.state == "DOWN"]:
        choice.warnings.append(
            f"RDMA ports that are down: {', '.join(down)} (a rail on every node, or a broken link?)"
        )
    num_gpus, num_ports = facts.num_gpus or 1, len(choice.ports)
    if num_gpus % num_ports and num_ports % num_gpus:
        choice.warnings.append(f"{num_ports} RDMA ports for {num_gpus} GPUs: is the set complete?")


def _is_accelerated_networking(facts: NetworkFacts, port: RdmaPort) -> bool:
    """Whether the port's function accelerates the synthetic NIC of a VM."""
    netdev = facts.interface(port.netdev)
    above = facts.interface(netdev.master) if netdev is not None else None
    return above is not None and above.driver == "hv_netvsc"


def _drop_elsewhere(facts: NetworkFacts, ports: Narrowing, warnings: list[str]) -> None:
    """Drop RoCE ports whose interface is in another network namespace; add a warning.

    RoCE resolves peers through an interface's addresses. With SR-IOV, a container sees all virtual
    functions under /sys/class/infiniband but only its own interfaces. No port is dropped if the
    list of interfaces may be incomplete, as in a pasted layout, or if no port would remain.
    """
    if not facts.interfaces_complete:
        return
    away = [
        port
        for port in ports.left
        if facts.link_layer(port) == "Ethernet" and not _has_interface(facts, port)
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
    """Whether the port's interface, or a macvlan above it (by the GIDs), is visible."""
    if facts.interface(port.netdev) is not None or port.driver in _WITHOUT_INTERFACE:
        return True
    return any(facts.owner(gid.addr) is not None for gid in port.gids)


def _listed(ports: Sequence[RdmaPort]) -> str:
    return ", ".join(f"{port.name} ({port.netdev})" if port.netdev else port.name for port in ports)


def _drop_virtual_functions(facts: NetworkFacts, ports: Narrowing) -> None:
    """Drop physical ports or virtual functions that are not of this container or VM.

    A container with virtual functions may see the host's physical ports, but not their interfaces.
    In a virtual machine the rails may be virtual functions, beside a physical front end of the
    other link layer.
    """
    here = [port for port in ports.left if facts.interface(port.netdev) is not None]
    if here and all(port.sriov_vf for port in here):
        ports.keep(
            lambda port: port in here or port.sriov_vf,
            "its interface is not here, unlike virtual functions'",
        )
    else:
        physical = {facts.link_layer(port) for port in ports.left if not port.sriov_vf}
        ports.keep(
            lambda port: not port.sriov_vf or not physical & {facts.link_layer(port), None},
            "virtual function beside physical ones",
        )


def _drop_front_end(facts: NetworkFacts, ports: Narrowing) -> None:
    """Drop the default route's port, unless it is the fastest or the GPUs need it."""
    way_out = facts.below(facts.default_route)
    # Where IPoIB is the only route, the InfiniBand port of the default route is still a rail.
    front = [
        port
        for port in ports.left
        if port.netdev in way_out and facts.link_layer(port) != "InfiniBand"
    ]
    rest = [port for port in ports.left if port not in front]
    is_fastest = front and rest and all(_rate(front) > _rate([port]) > 0 for port in rest)
    out = facts.interface(facts.default_route)
    # Of several equal default routes over interfaces without addresses only one is shown.
    is_one_of_many = out is not None and not out.is_unlisted and not out.routable
    if not (is_fastest or is_one_of_many or _is_needed_for_gpus(facts.num_gpus, front, rest)):
        ports.keep(
            lambda port: port not in front,
            f"the default route leaves through it ({facts.default_route})",
        )


def _is_needed_for_gpus(
    num_gpus: int | None, front: Sequence[RdmaPort], rest: Sequence[RdmaPort]
) -> bool:
    """Whether the GPUs divide evenly among all ports, but not among ``rest`` alone."""
    if not num_gpus or not front or not rest:
        return False
    count = len(front) + len(rest)
    is_even = (
        num_gpus % count == 0 and num_gpus % len(rest) != 0 and _rate(front) in (0, _rate(rest))
    )
    return count == num_gpus or is_even


def _rate(ports: Sequence[RdmaPort]) -> float:
    return max((port.rate_gbps or 0 for port in ports), default=0)


def _keep_one_link_layer(facts: NetworkFacts, ports: Narrowing) -> None:
    """Keep the link layer with the most bandwidth, else with one port per GPU, else InfiniBand."""
    layers = {port.name: facts.link_layer(port) for port in ports.left}
    if "InfiniBand" not in layers.values():
        return  # Ethernet or unknown: no evidence of two link layers
    present: dict[str, list[RdmaPort]] = {}
    for port in ports.left:
        if (layer := layers[port.name]) in ("InfiniBand", "Ethernet"):
            present.setdefault(layer, []).append(port)

    def claim(layer: str) -> tuple[float, bool, bool]:
        known = all(port.rate_gbps for group in present.values() for port in group)
        bandwidth = sum(port.rate_gbps or 0 for port in present[layer]) if known else 0.0
        return bandwidth, len(present[layer]) == facts.num_gpus, layer == "InfiniBand"

    best = max(present, key=claim)
    ports.keep(
        lambda port: port in present[best], f"not {best}; NCCL cannot use both link layers at once"
    )


def _keep_one_rate(ports: Narrowing) -> None:
    """Keep the rate with the most total bandwidth; unknown rates if they are more."""
    counts = Counter(port.rate_gbps for port in ports.left if port.rate_gbps)
    if not counts:
        return
    best = max(counts, key=lambda rate: (rate * counts[rate], rate))
    unknown = sum(port.rate_gbps is None for port in ports.left)
    if unknown <= counts[best]:
        ports.keep(
            lambda port: port.rate_gbps == best,
            f"not one of the {counts[best]} ports of {best:g} Gb/s",
        )
    else:
        ports.keep(lambda port: port.rate_gbps in (best, None), f"not {best:g} Gb/s")


def _drop_front_end_bond(facts: NetworkFacts, ports: Narrowing) -> None:
    """Drop the minority: a bonded pair among single ports is the front end."""

    def is_bonded(port: RdmaPort) -> bool:
        netdev = facts.interface(port.netdev)
        above = facts.interface(netdev.master) if netdev is not None else None
        return "bond" in {getattr(netdev, "type", None), getattr(above, "type", None)}

    num_bonded = sum(map(is_bonded, ports.left))
    if 2 * num_bonded != len(ports.left):
        bonds_are_rails = 2 * num_bonded > len(ports.left)
        ports.keep(
            lambda port: is_bonded(port) == bonds_are_rails, "bonded, or not, unlike the majority"
        )


def _keep_same_fabric(facts: NetworkFacts, ports: Narrowing, socket_ifname: str | None) -> None:
    """Keep the ports in the address plan of the socket interface, if it is a port.

    If the ports that do not fit are the majority and fit each other, they are the rails, and the
    socket interface is not.
    """
    chosen = facts.interface(socket_ifname)
    if chosen is None or not any(port.netdev == chosen.name for port in ports.left):
        return
    fitting = [port for port in ports.left if _fits(chosen, facts.interface(port.netdev))]
    others = [facts.interface(port.netdev) for port in ports.left if port not in fitting]
    rails = [one for one in others if one is not None and one.routable and _fits(others[0], one)]
    if len(fitting) < len(others) == len(rails):
        ports.keep(
            lambda port: port not in fitting,
            f"the other ports are rails of their own, {chosen.name} is not",
        )
        return
    ports.keep(
        lambda port: port in fitting,
        f"its address does not fit the fabric of {chosen.name}, where nodes meet",
    )


def _fits(one: Interface | None, other: Interface | None) -> bool:
    """Whether both fit one address plan: same /16 (/48), or same host part."""
    if one is None or other is None or other is one or not other.addresses or not one.routable:
        return True
    shift, host_part = {4: 16, 6: 80}, {4: 0xFF, 6: 0xFFFF}
    pairs = [(address_of(a), address_of(b)) for a in one.routable for b in other.routable]
    return any(
        int(a) >> shift[a.version] == int(b) >> shift[a.version]
        or not (int(a) ^ int(b)) & host_part[a.version]
        for a, b in pairs
        if a.version == b.version
    )


def _keep_near_gpus(gpus: Sequence[GpuLocation], ports: Narrowing) -> None:
    """Keep the ports below the GPUs' PCIe switches, else on the GPUs' NUMA nodes."""
    paths = [gpu.pci_path for gpu in gpus]
    if paths and all(paths) and all(port.pci_path for port in ports.left):
        near = [_names_near(path, ports.left) for path in paths]
        if all(near):
            names = set().union(*near)
            ports.keep(lambda port: port.name in names, "shares no switch with a GPU")
            return
    nodes = {gpu.numa for gpu in gpus}
    if nodes and None not in nodes and nodes <= {port.numa for port in ports.left}:
        ports.keep(lambda port: port.numa is None or port.numa in nodes, "its NUMA node has no GPU")


def _names_near(gpu_path: Sequence[str], ports: Iterable[RdmaPort]) -> set[str]:
    return {port.name for port in ports if _share_a_switch(gpu_path, port)}


def _share_a_switch(gpu_path: Sequence[str], port: RdmaPort) -> bool:
    """Whether both paths share the element below the root port, which is the first element."""
    return len(gpu_path) > 1 and len(port.pci_path) > 1 and gpu_path[:2] == port.pci_path[:2]


def _settle_surplus(facts: NetworkFacts, ports: Narrowing, socket_ifname: str | None) -> None:
    """Keep similar ports, one or two per GPU, if the number of ports does not fit.

    The others are storage and management ports of the same kind and rate. The property that
    distinguishes them depends on the machine.
    """
    num_gpus, count = facts.num_gpus, len(ports.left)
    if not num_gpus or num_gpus < 2 or count <= num_gpus or count % num_gpus == 0:
        return
    functions = Counter(_card(port) for port in facts.rdma_ports)  # including dropped ports
    netdevs = {port.name: facts.interface(port.netdev) for port in ports.left}
    properties: dict[str, Callable[[RdmaPort], Hashable]] = {
        "number of ports of its card": lambda port: functions[_card(port)] if port.pci else None,
        "driver": lambda port: port.driver,
        "being where nodes meet": lambda port: (
            port.netdev is not None and port.netdev == socket_ifname
        ),
        "having an interface": lambda port: port.netdev is not None,
        "bond or bridge above": lambda port: getattr(netdevs[port.name], "master", None),
        "state of its interface": lambda port: getattr(netdevs[port.name], "state", None),
        "addresses": lambda port: bool(one.routable) if (one := netdevs[port.name]) else None,
        "MTU": lambda port: getattr(netdevs[port.name], "mtu", None),
        "kind of interface name": lambda port: re.sub(r"\d.*", "", port.netdev or ""),
        "kind of device name": lambda port: re.sub(r"\d.*", "", port.name),
    }
    for num_ports in (num_gpus, 2 * num_gpus):
        for what, value_of in properties.items():
            sizes = Counter(value_of(port) for port in ports.left)
            fitting = [value for value, size in sizes.items() if size == num_ports]
            if len(fitting) == 1:
                ports.keep(
                    lambda port: value_of(port) == fitting[0],  # noqa: B023 (called before the next iteration)
                    f"differs in {what} from the {num_ports} ports that fit the {num_gpus} GPUs",
                )
                return


def _card(port: RdmaPort) -> str:
    return (port.pci or port.name).rpartition(".")[0] or port.name


def _choose_gid(facts: NetworkFacts, choice: RdmaChoice) -> None:
    seen = {
        port.name: index for port in choice.ports if (index := _gid_of(facts, port)) is not None
    }
    choice.gid_is_seen = bool(seen)
    if old := [port.name for port in choice.ports if port.gids and not any(map(_is_v2, port.gids))]:
        choice.warnings.append(f"no RoCE v2 GID on {', '.join(old)}: its v1 cannot be routed")
    if seen:
        choice.gid_index_per_hca = seen
        if len(set(seen.values())) == 1:
            choice.gid_index = next(iter(seen.values()))
            choice.why.append(f"GID index {choice.gid_index}: RoCE v2 in the GID table")
        else:
            listed = ", ".join(f"{name} {index}" for name, index in seen.items())
            choice.warnings.append(
                f"the GID index differs by device ({listed}): no single NCCL_IB_GID_INDEX is right"
            )
        return
    tables = [_filling(facts, port) for port in choice.ports]
    only_link_local = (
        bool(tables)
        and all(tables)
        and not any(one.is_unlisted or one.routable for table in tables for one in table)
    )
    choice.gid_index = _LINK_LOCAL_ROCE_V2 if only_link_local else _FIRST_ADDRESS_ROCE_V2
    choice.why.append(
        f"GID index {choice.gid_index}: no GID table is listed; where the kernel puts the first RoCE v2 GID"
    )


def _filling(facts: NetworkFacts, port: RdmaPort) -> tuple[Interface, ...]:
    """Interfaces whose addresses are in the GID table: its own, bonds, VLANs."""
    own = facts.interface(port.netdev)
    if own is None:
        return ()
    above = tuple(one for one in facts.above(own.name) if one.type != "bridge")
    # A bond holds the addresses of its members.
    return tuple(one for one in (own, *above) if one.master is None or one.addresses)


def _gid_of(facts: NetworkFacts, port: RdmaPort) -> int | None:
    """RoCE v2 GID index: IPv4, IPv6, link-local; then a current address, then the lowest index."""
    own = {address_of(text) for one in _filling(facts, port) for text in one.addresses}

    def rank(index: int, addr: str) -> tuple[bool, bool, bool, int]:
        address = address_of(addr)
        return address.is_link_local, address.version != 4, bool(own) and address not in own, index

    # Types are written RoCE_v2, RoCE v2 or v2; a device with RoCE v1 only has no such row.
    usable = [gid for gid in port.gids if _is_v2(gid)] or port.gids
    return min((rank(gid.index, gid.addr) for gid in usable), default=(0, 0, 0, None))[-1]


def _is_v2(gid: Gid) -> bool:
    return gid.type.upper().endswith("V2")
