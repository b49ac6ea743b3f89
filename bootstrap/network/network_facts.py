"""Network facts of one host as plain data: interfaces, RDMA ports, routes, routes to peers.

Input: a document of the schema ``netlayout/1`` (a YAML or JSON file, or
``network.host.read_host``). Output: frozen ``NetworkFacts``. Invariants: None means unknown, an
empty tuple means none; the keys ``name``, ``platform``, ``tags``, ``expected`` and other
descriptions of a layout are never read.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCHEMA = "netlayout/1"
CXI_HINT = "libfabric provider cxi"
TCPXO_HINT = "GPUDirect-TCPXO plug-in"
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Types without a physical link; a bridge or bond counts as wired if a wired interface is a member.
VIRTUAL_TYPES = frozenset({"bridge", "veth", "vxlan", "tun", "dummy"})
# Open vSwitch: the kernel makes the links of all its bridges members of one device, which always
# has this name, and does not report to which bridge a link belongs.
_SWITCH_DRIVER, _SWITCH = "openvswitch", "ovs-system"

# Ethernet speeds that no InfiniBand port of four lanes has (10, 20, 40, 56, 100, 200, 400, 800).
_ETHERNET_ONLY_GBPS = {1, 2.5, 5, 25, 50}
# rdma-core's rename rule (kernel-boot/rdma_rename.c) begins a device's name with the link layer.
_NAMED_BY_LAYER = {
    "InfiniBand": re.compile(r"ib[pso]\d"),
    "Ethernet": re.compile(r"(roce|iw)[pso]\d"),
}


class FactsFileError(ValueError):
    """A layout violates the schema; the message names the file or key, and the value."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface; addresses as text with or without prefix length."""

    name: str
    type: str = "ether"
    state: str = "unknown"
    ipv4: tuple[str, ...] | None = None
    ipv6: tuple[str, ...] | None = None
    mtu: int | None = None
    speed_mbps: int | None = None
    driver: str | None = None
    pci: str | None = None
    master: str | None = None
    parent: str | None = None  # of a VLAN or macvlan: the interface below it

    @property
    def addresses(self) -> tuple[str, ...]:
        """Known addresses, IPv4 first."""
        return (self.ipv4 or ()) + (self.ipv6 or ())

    @property
    def routable(self) -> tuple[str, ...]:
        """Addresses that another host can use: neither loopback nor link-local nor multicast."""
        return tuple(text for text in self.addresses if _is_routable(address_of(text)))

    @property
    def is_unlisted(self) -> bool:
        """Whether the interface may have addresses that the source omits."""
        return self.ipv4 is None or (self.ipv6 is None and not self.ipv4)


@dataclass(frozen=True, slots=True)
class Gid:
    """One row of a port's GID table: ``type`` is RoCE_v1 or RoCE_v2 (IB for InfiniBand)."""

    index: int
    type: str
    addr: str


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device.

    ``pci_path``: PCI addresses from the root port down, if known. ``is_open``: programs may open
    the device, or nothing says the contrary.
    """

    name: str
    port: int = 1
    state: str = "unknown"
    link_layer: str | None = None
    rate_gbps: float | None = None
    netdev: str | None = None
    pci: str | None = None
    numa: int | None = None
    driver: str | None = None
    sriov_vf: bool = False
    gids: tuple[Gid, ...] = ()
    pci_path: tuple[str, ...] = ()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class GpuLocation:
    """Location of a GPU in the machine."""

    numa: int | None = None
    pci_path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Network facts of one host.

    ``num_gpus`` is None if unknown; ``gpus`` lists only GPUs whose location is known.
    ``hints`` are remarks; those that begin with CXI_HINT or TCPXO_HINT identify a fabric.
    ``interfaces_complete``: the list contains every interface of the network namespace.
    """

    interfaces: tuple[Interface, ...]
    rdma_ports: tuple[RdmaPort, ...] = ()
    default_route: str | None = None
    hints: tuple[str, ...] = ()
    num_gpus: int | None = None
    gpus: tuple[GpuLocation, ...] = ()
    interfaces_complete: bool = False

    def interface(self, name: str | None) -> Interface | None:
        return next((one for one in self.interfaces if one.name == name), None)

    def members(self, name: str) -> tuple[Interface, ...]:
        """Interfaces enslaved to the interface ``name``."""
        return tuple(one for one in self.interfaces if one.master == name)

    def below(self, name: str | None) -> set[str]:
        """The interface and all below it: members of bonds and bridges, parents of VLANs."""
        interfaces: set[str] = set()
        waiting = [name] if name else []
        while waiting:
            current = waiting.pop()
            if current in interfaces:
                continue
            interfaces.add(current)
            waiting += [member.name for member in self.members(current)]
            one = self.interface(current)
            if one is not None:
                waiting += [wire.name for wire in self._switch_wires(one)]
            if one is not None and one.parent:
                waiting.append(one.parent)
            elif one is not None and one.type == "vlan":  # by convention named PARENT.ID
                waiting += [
                    parent for parent in [current.rpartition(".")[0]] if self.interface(parent)
                ]
        return interfaces

    def above(self, name: str | None) -> tuple[Interface, ...]:
        """The interfaces that send through this one: bonds, bridges, VLANs and macvlans."""
        return tuple(
            one
            for one in self.interfaces
            if name and one.name != name and name in self.below(one.name)
        )

    def _switch_wires(self, one: Interface) -> tuple[Interface, ...]:
        """Links of Open vSwitch if this is one of its bridges, which have no members."""
        of_switch = [
            other.name for other in self.interfaces if _SWITCH in (other.name, other.master)
        ]
        is_bridge = one.driver == _SWITCH_DRIVER or (
            one.type in ("bridge", "dummy") and not one.driver and bool(one.routable)
        )
        if not of_switch or one.name == _SWITCH or not is_bridge or self.members(one.name):
            return ()
        return tuple(other for other in self.members(_SWITCH) if other.type not in VIRTUAL_TYPES)

    def is_wired(self, one: Interface) -> bool:
        """Whether traffic leaves the host here, not through a tunnel or another interface."""
        if one.type == "bridge" or self._switch_wires(one):
            return any(
                member.type not in VIRTUAL_TYPES
                for member in (*self.members(one.name), *self._switch_wires(one))
            )
        return one.type not in VIRTUAL_TYPES and one.type != "loopback"

    def link_layer(self, port: RdmaPort) -> str | None:
        """Link layer by the port, else its GIDs, netdev, rate or name; None if unknown."""
        if port.link_layer in ("InfiniBand", "Ethernet"):
            return port.link_layer
        if any(gid.type.upper().startswith(("ROCE", "V")) for gid in port.gids):
            return "Ethernet"
        netdev = self.interface(port.netdev)
        if netdev is not None:
            return "InfiniBand" if netdev.type == "infiniband" else "Ethernet"
        if port.rate_gbps in _ETHERNET_ONLY_GBPS:
            return "Ethernet"
        return next(
            (layer for layer, form in _NAMED_BY_LAYER.items() if form.match(port.name)), None
        )

    def owner(self, address: str) -> Interface | None:
        """The interface that holds ``address``."""
        wanted = address_of(address)
        for interface in self.interfaces:
            if wanted in map(address_of, interface.addresses):
                return interface
        return None


def address_of(text: str) -> IpAddress:
    """Parse ``10.0.0.1/24``, ``fe80::1%eth0``, or ``::ffff:10.0.0.1`` (becomes IPv4)."""
    address = ipaddress.ip_address(text.split("/")[0].split("%")[0])
    mapped = address.ipv4_mapped if address.version == 6 else None
    return mapped or address


def network_of(text: str) -> IpNetwork | None:
    """The connected network of an address with prefix length; None without a prefix length."""
    if "/" not in text:
        return None
    address, _, prefix = text.partition("/")
    return ipaddress.ip_interface(f"{address.split('%')[0]}/{prefix}").network


def _is_routable(address: IpAddress) -> bool:
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
    )


def load_facts(path: Path) -> NetworkFacts:
    """Load facts from a YAML or JSON file.

    Raises:
        FactsFileError: the file cannot be read, or is not a layout.
    """
    try:
        return parse_facts(load_document(path))
    except FactsFileError as error:
        raise FactsFileError(f"{path}: {error}") from error


def load_document(path: Path) -> Mapping[str, object]:
    """The mapping in a YAML or JSON file.

    Raises:
        FactsFileError: no such file, not YAML, or no mapping.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FactsFileError(f"cannot be read: {error}") from error
    try:
        document = json.loads(text)
    except ValueError:
        import yaml  # only for hand-written files; --save writes JSON

        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise FactsFileError(f"is neither YAML nor JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise FactsFileError(
            f"holds a {type(document).__name__}; a mapping of the schema {SCHEMA} is needed"
        )
    return document


def parse_facts(document: Mapping[str, object]) -> NetworkFacts:
    """Parse a document of the schema; unknown keys are ignored.

    Raises:
        FactsFileError: another schema, or a value of the wrong type; names the key.
    """
    if document.get("schema", SCHEMA) != SCHEMA:
        raise FactsFileError(f"schema is {document['schema']!r}; {SCHEMA!r} is needed")
    route = _mapping(document, "default_route")
    gpus = _mapping(document, "gpus")
    return NetworkFacts(
        interfaces=tuple(_interface(row) for row in _rows(document, "interfaces")),
        rdma_ports=tuple(_port(row) for row in _rows(document, "rdma_devices")),
        default_route=_text(route, "iface"),
        hints=tuple(map(str, _list(document, "provider_hints"))),
        num_gpus=_count(gpus, "count"),
        interfaces_complete=document.get("interfaces_complete") is True,
        gpus=tuple(
            GpuLocation(_count(row, "numa"), tuple(map(str, _list(row, "pci_path"))))
            for row in _list(gpus, "devices")
        ),
    )


def _mapping(document: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = document.get(key) or {}
    if not isinstance(value, Mapping):
        raise FactsFileError(f"{key} must be a mapping, got {value!r:.200}")
    return value


def _text(row: Mapping[str, object], key: str) -> str | None:
    """A text; None if missing or empty."""
    return str(row[key]) if row.get(key) else None


def _list(row: Mapping[str, object], key: str) -> list[Any]:
    """A list; empty if missing."""
    value = row.get(key) or []
    if not isinstance(value, list | tuple):
        raise FactsFileError(f"{key} must be a list, got {value!r:.200}")
    return list(value)


def _number(row: Mapping[str, object], key: str) -> float | None:
    """A number, possibly in quotes; None if missing."""
    value = row.get(key)
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(str(value))
    except ValueError:
        raise FactsFileError(
            f"{key} must be a number, got {value!r:.200} in {row.get('name')}"
        ) from None


def _count(row: Mapping[str, object], key: str) -> int | None:
    number = _number(row, key)
    return None if number is None else int(number)


def _rows(document: Mapping[str, object], key: str) -> Sequence[Mapping[str, object]]:
    rows = document.get(key) or ()
    if (
        not isinstance(rows, Sequence)
        or isinstance(rows, str)
        or any(not isinstance(row, Mapping) or "name" not in row for row in rows)
    ):
        raise FactsFileError(f"{key} must be a list of mappings with a name, got {rows!r:.200}")
    return rows


def _interface(row: Mapping[str, object]) -> Interface:
    return Interface(
        name=str(row["name"]),
        type=_text(row, "type") or "ether",
        state=_text(row, "state") or "unknown",
        ipv4=_addresses(row, "ipv4"),
        ipv6=_addresses(row, "ipv6"),
        mtu=_count(row, "mtu"),
        speed_mbps=_count(row, "speed_mbps"),
        driver=_text(row, "driver"),
        pci=_text(row, "pci"),
        master=_text(row, "master"),
        parent=_text(row, "parent"),
    )


def _port(row: Mapping[str, object]) -> RdmaPort:
    gids = tuple(
        Gid(int(gid["index"]), gid.get("type") or "", str(gid["addr"]))
        for gid in _list(row, "gids")
        if gid.get("index") is not None and _is_legible(gid.get("addr"))
    )
    return RdmaPort(
        name=str(row["name"]),
        port=_count(row, "port") or 1,
        state=_port_state(str(row.get("state") or "")),
        link_layer=_text(row, "link_layer"),
        rate_gbps=_number(row, "rate_gbps"),
        netdev=_text(row, "netdev"),
        pci=_text(row, "pci"),
        numa=_count(row, "numa"),
        driver=_text(row, "driver"),
        sriov_vf=bool(row.get("sriov_vf") or row.get("vf_of")),
        gids=gids,
        pci_path=tuple(map(str, _list(row, "pci_path"))),
        is_open=row.get("verbs") is not False,
    )


def _port_state(text: str) -> str:
    """Parse a state as tools print it: ``4: ACTIVE``, ``INIT`` (no subnet manager)."""
    words = set(re.findall(r"[A-Z]+", text.upper()))
    if "ACTIVE" in words:
        return "ACTIVE"
    down = {"DOWN", "INIT", "INITIALIZING", "ARMED", "POLLING", "DISABLED", "INACTIVE"}
    return "DOWN" if words & down else "unknown"


def _addresses(row: Mapping[str, object], key: str) -> tuple[str, ...] | None:
    """The valid addresses; None if all are masked, as users do in bug reports."""
    given = row.get(key)
    if given is None:
        return None
    texts = [given] if isinstance(given, str) else _list(row, key)
    legible = tuple(str(text) for text in texts if _is_legible(text))
    return legible if legible or not texts else None


def _is_legible(text: object) -> bool:
    try:
        ipaddress.ip_interface(str(text).split("%")[0] if "/" not in str(text) else str(text))
    except ValueError:
        logger.warning("%r is not an address; treated as unknown", text)
        return False
    return True
