"""Read this host's network facts as a document of the schema ``netlayout/1``.

Input: sysfs and procfs (below ``root``, which tests replace), addresses from netifaces. Output: a
mapping that JSON can represent. Decides nothing. Facts that the kernel does not report are None.
"""

from __future__ import annotations

import array
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any

import netifaces

from bootstrap.network.network_facts import CXI_HINT, SCHEMA, TCPXO_HINT, NetworkFacts, parse_facts

# linux/if_arp.h; the tunnels are PPP, IPIP, IPIP6, SIT, GRE, GRE over IPv6 and devices without ARP.
_ARP_TYPES = {"1": "ether", "32": "infiniband", "772": "loopback"}
_ARP_TYPES |= dict.fromkeys(("512", "768", "769", "776", "778", "823", "65534"), "tun")
_DEVTYPES = {
    "bond": "bond",
    "bridge": "bridge",
    "vlan": "vlan",
    "vxlan": "vxlan",
    "wireguard": "tun",
    "geneve": "vxlan",
}
_GPU_VENDORS = {"0x10de", "0x1002", "0x8086"}
# 3D controller, other display, processing accelerator
_GPU_CLASSES = ("0x0302", "0x0380", "0x1200")
_NVIDIA_VGA = ("0x10de", "0x0300")
_INFINIBAND_CONTROLLER = "0x0207"
# Google's Slurm prolog installs the plug-in here for each job, and containers mount the folder
# (Cluster Toolkit documentation, "Enable GPUDirect-TCPXO optimized NCCL communication").
_TCPXO_PLUG_IN = "var/lib/tcpxo/lib64"
_MAX_GIDS = 256
_SIOCETHTOOL, _ETHTOOL_GDRVINFO, _DRVINFO_BYTES = 0x8946, 0x3, 196
_LIBRARY_FOLDERS = (
    "usr/lib",
    "usr/lib64",
    "lib64",
    "usr/local/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
)


def read_host() -> NetworkFacts:
    """Read the facts of this host without a name lookup, which may hang."""
    return parse_facts(read_document())


def read_document(root: Path = Path("/")) -> dict[str, object]:
    """Read the facts of a host in the public schema."""
    interfaces = [
        _interface(path) for path in sorted(_entries(root / "sys/class/net"), key=_ifindex)
    ]
    devices = read_rdma_devices(root)
    gpus = [gpu for path in sorted(_entries(root / "sys/bus/pci/devices")) if (gpu := _gpu(path))]
    return {
        "schema": SCHEMA,
        "vantage": "container" if (root / ".dockerenv").exists() else "host",
        "listing_order": "ifindex",
        "interfaces_complete": True,
        "gpus": {"count": len(gpus) or None, "devices": gpus},
        "interfaces": interfaces,
        "default_route": {"iface": default_route(root), "basis": "quoted"},
        "rdma_devices": devices,
        "provider_hints": list(_hints(root, has_rdma=bool(devices))),
    }


def read_rdma_devices(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Every port of every RDMA device, as rows of ``rdma_devices``."""
    is_open = _openable_devices(root)
    rows = []
    for path in sorted(_entries(root / "sys/class/infiniband")):
        rows += [{**row, "verbs": is_open.get(path.name)} for row in _ports(path)]
    return rows


def _openable_devices(root: Path) -> dict[str, bool]:
    """Whether this process may open each RDMA device, by its name.

    Programs open /dev/infiniband/uverbsN (Documentation/ABI/stable/sysfs-class-infiniband). A
    container shows every device in sysfs, also those that it was not given.
    """
    found = {}
    for path in _entries(root / "sys/class/infiniband_verbs"):
        device = root / "dev/infiniband" / path.name
        found[_text(path / "ibdev")] = os.access(device, os.R_OK | os.W_OK)
    return found


def default_route(root: Path = Path("/")) -> str | None:
    """Interface of the default route with the lowest metric; IPv6 if IPv4 has none."""
    routes: list[tuple[int, str]] = []
    for line in _text(root / "proc/net/route").splitlines()[1:]:
        # name, destination, gateway, flags (1: RTF_UP), counters, metric (decimal), mask; in hex
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000" and int(fields[3], 16) & 1:
            routes.append((int(fields[6]), fields[0]))
    if not routes:
        for line in _text(root / "proc/net/ipv6_route").splitlines():
            fields = line.split()
            is_default = len(fields) > 9 and fields[0] == "0" * 32 and fields[1] == "00"
            if is_default and fields[9] != "lo":
                routes.append((int(fields[5], 16), fields[9]))
    # With equal metrics the kernel uses the first route; so does min.
    return min(routes, key=lambda route: route[0])[1] if routes else None


def _interface(path: Path) -> dict[str, object]:
    name, device = path.name, path / "device"
    ipv4, ipv6 = _addresses(name)
    speed = _number(path / "speed")
    state, kind = _text(path / "operstate"), _type(path)
    driver = _link(device / "driver")
    if driver is None and path.parent == Path("/sys/class/net"):
        driver = driver_without_device(name)
    lower = [link.name.removeprefix("lower_") for link in path.glob("lower_*")]
    if state not in ("up", "down"):  # tunnels and loopback have no carrier: use the IFF_UP flag
        state = "up" if (_number(path / "flags", 16) or 0) & 1 else "down"
    return {
        "name": name,
        "type": kind,
        "state": state,
        "ipv4": ipv4,
        "ipv6": ipv6,
        "mtu": _number(path / "mtu"),
        "speed_mbps": speed if speed and 0 < speed < 2**31 else None,
        "driver": driver,
        "pci": _link(device) if re.fullmatch(r"[0-9a-f:.]+", _link(device) or "-") else None,
        "master": _link(path / "master"),
        "parent": lower[0] if len(lower) == 1 and kind not in ("bond", "bridge") else None,
        "sriov_vf": (device / "physfn").exists(),
    }


def driver_without_device(name: str) -> str | None:
    """Driver of an interface without hardware: ``openvswitch``, ``vrf``, ``macvlan``.

    sysfs does not show it. ETHTOOL_GDRVINFO (linux/ethtool.h): a command, then the driver's name in
    32 bytes.
    """
    answer = array.array("B", struct.pack("I", _ETHTOOL_GDRVINFO) + bytes(_DRVINFO_BYTES - 4))
    request = struct.pack("16sP", name.encode(), answer.buffer_info()[0])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        ioctl(asking, _SIOCETHTOOL, request)
        return answer.tobytes()[4:36].partition(b"\0")[0].decode(errors="replace") or None
    return None


def _type(path: Path) -> str:
    if (path / "bridge").exists():
        return "bridge"
    if (path / "bonding").exists():
        return "bond"
    if (path / "tun_flags").exists():
        return "tun"
    devtype = re.search(r"^DEVTYPE=(\w+)", _text(path / "uevent"), re.MULTILINE)
    if devtype and devtype[1] in _DEVTYPES:
        return _DEVTYPES[devtype[1]]
    by_arp = _ARP_TYPES.get(_text(path / "type"), "ether")
    if by_arp == "ether" and not (path / "device").exists() and not devtype:
        # a team, for which sysfs has no folder; else a macvlan
        if lower := list(path.glob("lower_*")):
            return "bond" if any((link / "master").exists() for link in lower) else "ether"
        # No hardware: iflink of a veth is its peer; other interfaces (dummy, ifb) name themselves.
        return "dummy" if _text(path / "iflink") == _text(path / "ifindex") else "veth"
    return by_arp


def _addresses(name: str) -> tuple[list[str], list[str]]:
    """IPv4 and IPv6 addresses with prefix length, including labelled ones (``eth0:1``)."""
    ipv4: list[str] = []
    ipv6: list[str] = []
    for label in netifaces.interfaces():
        if label.partition(":")[0] == name:
            ipv4 += addresses_of(label, socket.AF_INET)
            ipv6 += addresses_of(label, socket.AF_INET6)
    return ipv4, ipv6


def addresses_of(label: str, family: socket.AddressFamily) -> list[str]:
    """Addresses with prefix length of a name in ``netifaces.interfaces``, which lists labels too."""
    try:
        rows = netifaces.ifaddresses(label).get(int(family), [])
    except ValueError:  # the interface was removed
        return []
    # netmask: 255.255.255.0, or ffff:ffff::/32
    return [
        f"{row['addr'].partition('%')[0]}/{_prefix_length(row.get('netmask', ''), family)}"
        for row in rows
    ]


def _prefix_length(netmask: str, family: socket.AddressFamily) -> int:
    if "/" in netmask:
        return int(netmask.partition("/")[2])
    if family == socket.AF_INET:
        return ipaddress.ip_network(f"0.0.0.0/{netmask or '255.255.255.255'}").prefixlen
    return 128


def _ports(device: Path) -> list[dict[str, object]]:
    hardware = device / "device"
    numa = _number(hardware / "numa_node")
    common = {
        "driver": _link(hardware / "driver"),
        "pci": _link(hardware),
        "pci_path": _pci_path(hardware),
        "numa": numa if numa is not None and numa >= 0 else None,
        "sriov_vf": (hardware / "physfn").exists(),
    }
    return [
        {"name": device.name, "port": int(port.name), **_port(port, hardware), **common}
        for port in sorted(_entries(device / "ports"))
    ]


def _port(port: Path, hardware: Path) -> dict[str, object]:
    rate = re.match(r"[\d.]+", _text(port / "rate"))
    layer = _text(port / "link_layer")
    netdev = _text(port / "gid_attrs/ndevs/0")
    if not netdev:
        # The RDMA ports of a device count from 1, dev_port of its interfaces from 0.
        beside = [
            path
            for path in _entries(hardware / "net")
            if (_number(path / "dev_port") or 0) + 1 == int(port.name)
        ]
        netdev = min((path.name for path in beside), default="")
    return {
        "state": "ACTIVE" if _text(port / "state").endswith("ACTIVE") else "DOWN",
        "link_layer": layer if layer in ("InfiniBand", "Ethernet") else None,
        "rate_gbps": float(rate[0]) if rate else None,
        "netdev": netdev or None,
        "gids": _gids(port) if layer == "Ethernet" else [],
    }


def _gids(port: Path) -> list[dict[str, object]]:
    """GID rows of this network namespace; in a pod the table has the host's too."""
    rows = []
    for index in range(_MAX_GIDS):
        if not (text := _text(port / f"gids/{index}")):
            break
        address = ipaddress.IPv6Address(text)
        if int(address) and _text(port / f"gid_attrs/ndevs/{index}"):
            kind = "RoCE_v2" if "v2" in _text(port / f"gid_attrs/types/{index}") else "RoCE_v1"
            shown = f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)
            rows.append({"index": index, "type": kind, "addr": shown})
    return rows


def _gpu(path: Path) -> dict[str, object] | None:
    vendor, kind = _text(path / "vendor"), _text(path / "class")
    is_accelerator = vendor in _GPU_VENDORS and kind.startswith(_GPU_CLASSES)
    if not is_accelerator and (vendor, kind[:6]) != _NVIDIA_VGA:
        return None
    numa = _number(path / "numa_node")
    return {"numa": numa if numa is not None and numa >= 0 else None, "pci_path": _pci_path(path)}


def _hints(root: Path, *, has_rdma: bool) -> Iterable[str]:
    """Remarks about the fabric that follow neither from an interface nor from a port."""
    if _entries(root / "sys/class/cxi"):
        yield f"{CXI_HINT} (class cxi)"
    if (root / _TCPXO_PLUG_IN).exists():
        yield f"{TCPXO_HINT} in /{_TCPXO_PLUG_IN}"
    pci = _entries(root / "sys/bus/pci/devices")
    if not has_rdma and any(
        _text(path / "class").startswith(_INFINIBAND_CONTROLLER) for path in pci
    ):
        yield "no RDMA device although there is an InfiniBand controller: is a kernel module such as mlx5_ib missing?"
    if has_rdma:
        folders = [root / folder for folder in _LIBRARY_FOLDERS]
        if not any(True for folder in folders for _ in folder.glob("libibverbs.so*")):
            yield "no libibverbs in the usual folders: NCCL would fall back to sockets"
        if not (root / "dev/infiniband").exists():
            yield "no /dev/infiniband: the container was given no RDMA devices"


def _pci_path(device: Path) -> list[str]:
    """PCI addresses from the root port down to the device."""
    return re.findall(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", os.path.realpath(device))


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def _ifindex(path: Path) -> int:
    return _number(path / "ifindex") or 0


def _link(path: Path) -> str | None:
    return path.resolve().name if path.exists() else None


def _text(path: Path) -> str:
    """The file's text; empty if there is none to read (unused GID, link down)."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path, base: int = 10) -> int | None:
    with suppress(ValueError):
        return int(_text(path), base)
    return None
