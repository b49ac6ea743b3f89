"""Decide the network settings of one host: interface, RDMA ports, environment, with reasons. Pure.

Input: facts of this host, the variables set by the user or the site. Output: a ``Detection``.
Settings apply to one host only: names of interfaces and devices differ between the nodes of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bootstrap.network.network_facts import NetworkFacts, RdmaPort, address_of
from bootstrap.network.rdma import RdmaChoice, choose_rdma
from bootstrap.network.sockets import SocketChoice, choose_socket

# Variables of the user or the site with these prefixes are listed with the detected ones. Detection
# never sets traffic class, timeouts or levels, because no fact of a host determines their value.
_FABRIC_PREFIXES = ("NCCL_", "NVSHMEM_", "UCX_", "GLOO_", "TP_", "FI_", "OFI_", "RDMAV_")


@dataclass(frozen=True, slots=True)
class Detection:
    """The network settings of one host."""

    socket: SocketChoice
    rdma: RdmaChoice
    settings: Mapping[str, NetworkSetting]
    conflicts: tuple[Conflict, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        """The environment to add."""
        return {name: setting.value for name, setting in self.settings.items()}

    @property
    def rdma_env(self) -> dict[str, str]:
        """The environment to add, without the variables of the interface for sockets."""
        of_sockets = socket_settings(self.socket.ifname, self.socket.ip)
        return {name: value for name, value in self.env.items() if name not in of_sockets}

    def describe(self) -> str:
        """Report for the log: result, variables with reasons, evidence, warnings."""
        answer = self.to_document()
        lines = []
        for key in ("socket_ifname", "node_ip", "rdma", "ib_hca", "ib_hca_exclude", "gid_index"):
            value = answer[key]
            lines.append(f"{key:<16}{', '.join(value) if isinstance(value, list) else value}")
        lines += [
            f"{name}={setting.value}  # {setting.reason}" for name, setting in self.settings.items()
        ]
        warnings = (*self.socket.warnings, *self.rdma.warnings)
        remarks = [("why", answer["why"]), *(("warning", text) for text in warnings)]
        return "\n".join([*lines, *(f"{what:<16}{text}" for what, text in remarks)])

    @property
    def conflict_lines(self) -> tuple[str, ...]:
        """The conflicts as text, for the preflight."""
        return tuple(map(str, self.conflicts))

    def to_document(self) -> dict[str, object]:
        """The result as a mapping for JSON."""
        rdma = self.rdma
        return {
            "socket_ifname": self.socket.ifname,
            "node_ip": self.socket.ip,
            "rdma": rdma.kind,
            "ib_hca": _names(rdma.ports),
            # A device counts as used if one of its ports is; ``env`` names the port.
            "ib_hca_exclude": [
                name for name in _names(rdma.excluded) if name not in _names(rdma.ports)
            ],
            "gid_index": rdma.gid_index,
            "gid_index_per_hca": rdma.gid_index_per_hca,
            "data_ifaces": list(rdma.data_ifnames),
            "env": self.env,
            "env_why": {name: setting.reason for name, setting in self.settings.items()},
            "warnings": [*self.socket.warnings, *rdma.warnings],
            "conflicts": list(self.conflict_lines),
            "why": "; ".join((*self.socket.why, *rdma.why)),
        }


def detect(
    facts: NetworkFacts,
    *,
    override: str | None = None,
    connection_ip: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Detection:
    """Decide for one host.

    Args:
        override: interface for sockets that the user selected.
        connection_ip: local address of the connection to the head; takes precedence over all
            evidence except ``override``.
        environ: variables set by the user or the site profile; they are never changed.
    """
    sockets = choose_socket(facts, override, connection_ip)
    rdma = choose_rdma(facts, sockets.ifname)
    variables = {name: value for name, value in (environ or {}).items() if value}
    detected = {
        **socket_settings(sockets.ifname, sockets.ip),
        **_rdma_settings(facts, rdma, sockets.ifname),
    }
    settings = {name: setting for name, setting in detected.items() if name not in variables}
    for name in sorted(variables):
        if name.startswith(_FABRIC_PREFIXES):
            settings[name] = NetworkSetting(variables[name], "set by the user or the site")
    conflicting = conflicts(variables, facts, ifname=sockets.ifname, rdma=rdma, detected=detected)
    return Detection(sockets, rdma, settings, conflicting)


def socket_settings(ifname: str | None, ip: str | None) -> dict[str, NetworkSetting]:
    """Variables that make each library use ``ifname``.

    Gloo and TensorPipe expect a plain device name. NCCL, and NVSHMEM with the same parser, expect a
    prefix, or an exact name after ``=`` (NCCL user guide, NCCL_SOCKET_IFNAME): a plain ``eth1``
    would also match ``eth10``. Both prefer IPv4, so IPv6 must be selected explicitly.
    """
    if not ifname:
        return {}
    settings = {
        "GLOO_SOCKET_IFNAME": NetworkSetting(ifname, "Gloo takes one bare name"),
        "TP_SOCKET_IFNAME": NetworkSetting(ifname, "TensorPipe takes one bare name"),
        "NCCL_SOCKET_IFNAME": NetworkSetting(
            f"={ifname}", "= makes NCCL match the whole name, not a prefix"
        ),
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": NetworkSetting(
            f"={ifname}", "NVSHMEM reads names as NCCL does"
        ),
    }
    if ip and address_of(ip).version == 6:
        settings["NCCL_SOCKET_FAMILY"] = NetworkSetting("AF_INET6", "the node's address is IPv6")
        settings["NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY"] = NetworkSetting(
            "AF_INET6", "the node's address is IPv6"
        )
    return settings


_OFI_PLUGIN = "AWS Libfabric"
"""The name of aws-ofi-nccl, which all its versions accept in NCCL_NET.

Versions since 1.12 are called Libfabric, and take this name where NCCL_NET asks for it.
"""


def _rdma_settings(
    facts: NetworkFacts, rdma: RdmaChoice, ifname: str | None
) -> dict[str, NetworkSetting]:
    if rdma.kind in ("efa", "cxi"):
        return {
            "FI_PROVIDER": NetworkSetting(
                rdma.kind, "libfabric is to use this fabric or fail, not fall back to TCP"
            ),
            "NCCL_NET": NetworkSetting(
                _OFI_PLUGIN, "NCCL is to use libfabric through aws-ofi-nccl or fail, not fall back"
            ),
        }
    if rdma.kind == "gpudirect-tcpx":
        # Four data NICs mean GPUDirect-TCPX, eight its successor TCPXO (FasTrak).
        is_fastrak = len(rdma.data_ifnames) > 4
        data = "NCCL_FASTRAK_IFNAME" if is_fastrak else "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"
        settings = {
            data: NetworkSetting(",".join(rdma.data_ifnames), "NICs for the data of the GPUs")
        }
        if ifname:
            control = "NCCL_FASTRAK_CTRL_DEV" if is_fastrak else "NCCL_GPUDIRECTTCPX_CTRL_DEV"
            settings[control] = NetworkSetting(ifname, "NIC for control messages")
        return settings
    if rdma.kind not in ("ib", "roce") or not rdma.ports:
        return {}
    settings = {}
    active = {(port.name, port.port) for port in facts.rdma_ports if port.state == "ACTIVE"}
    ports = ",".join(f"{port.name}:{port.port}" for port in rdma.ports)
    if {(port.name, port.port) for port in rdma.ports} != active:
        reason = f"not all active ports: {', '.join(_names(rdma.excluded))} left out"
        settings["NCCL_IB_HCA"] = NetworkSetting(f"={ports}", reason)
        settings["NVSHMEM_HCA_LIST"] = NetworkSetting(ports, reason)
        # A list without an interface would leave UCX no TCP to fall back to.
        settings["UCX_NET_DEVICES"] = NetworkSetting(
            f"{ports},{ifname}" if ifname else ports, reason
        )
    if rdma.gid_is_seen and rdma.gid_index is not None:
        settings["NVSHMEM_IB_GID_INDEX"] = NetworkSetting(
            str(rdma.gid_index), "NVSHMEM takes index 0 by default"
        )
        if not _has_ipv4_gid(rdma):
            settings["NCCL_IB_GID_INDEX"] = NetworkSetting(
                str(rdma.gid_index), "NCCL looks for an IPv4 GID; there is none"
            )
    return settings


def _has_ipv4_gid(rdma: RdmaChoice) -> bool:
    return any(address_of(gid.addr).version == 4 for port in rdma.ports for gid in port.gids)


def _names(ports: tuple[RdmaPort, ...]) -> list[str]:
    return list(dict.fromkeys(port.name for port in ports))


# Gloo and TensorPipe expect names; the others expect NCCL's patterns.
_BARE_NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PATTERNS = ("NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
_GID_VARIABLES = ("NCCL_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX")


@dataclass(frozen=True, slots=True)
class NetworkSetting:
    """A variable's value and the reason for it."""

    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """A variable that differs from the detected value; ``source``: the evidence."""

    name: str
    given: str
    detected: str
    source: str

    def __str__(self) -> str:
        return (
            f"{self.name}={self.given} is set (cluster profile, --environment, the submitting shell or the image) and "
            f"stays; this host shows {self.detected} ({self.source}). Unset it unless the site asks for it"
        )


def conflicts(
    variables: Mapping[str, str],
    facts: NetworkFacts,
    *,
    ifname: str | None,
    rdma: RdmaChoice,
    detected: Mapping[str, NetworkSetting],
) -> tuple[Conflict, ...]:
    """Conflicts of variables with the settings detected without them, sorted by variable.

    The variable always wins: the site may know more than detection can read.

    Args:
        variables: those that are set and not empty.
        ifname: the detected interface for sockets.
        detected: variables that detection would set.
    """
    result = [
        *_of_sockets(variables, ifname),
        *_of_devices(variables, facts, rdma),
        *_of_gid(variables, rdma),
    ]
    judged = {*_BARE_NAMES, *_PATTERNS, *_GID_VARIABLES, "NCCL_IB_HCA"}
    for name, setting in detected.items():
        if name in variables and name not in judged and variables[name].strip() != setting.value:
            result.append(Conflict(name, variables[name], setting.value, setting.reason))
    return tuple(sorted(result, key=lambda conflict: conflict.name))


def selected(pattern: str, names: Sequence[str]) -> set[str]:
    """The ``names`` that an NCCL list selects: by prefix; ``=`` exact, ``^`` others.

    A name may have a port (``mlx5_0:1``); a device without a port selects all its ports (NCCL user
    guide, NCCL_IB_HCA).
    """
    excludes, text = pattern.startswith("^"), pattern.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    hits = {name for name in names for entry in entries if _matches(entry, name, is_exact=is_exact)}
    return set(names) - hits if excludes else hits


def _matches(entry: str, name: str, *, is_exact: bool) -> bool:
    wanted, _, wanted_port = entry.partition(":")
    device, _, port = name.partition(":")
    if wanted_port and port and wanted_port != port:
        return False
    return device == wanted if is_exact else device.startswith(wanted)


def _of_sockets(given: Mapping[str, str], ifname: str | None) -> Iterator[Conflict]:
    if not ifname:
        return
    source = "the interface over which the nodes reach each other"
    for name in _BARE_NAMES:
        if name in given and ifname not in [part.strip() for part in given[name].split(",")]:
            yield Conflict(name, given[name], ifname, source)
    for name in _PATTERNS:
        if name in given and not selected(given[name], [ifname]):
            yield Conflict(name, given[name], f"={ifname}", source)


def _of_devices(
    given: Mapping[str, str], facts: NetworkFacts, rdma: RdmaChoice
) -> Iterator[Conflict]:
    if "NCCL_IB_HCA" not in given or rdma.kind not in ("ib", "roce") or not rdma.ports:
        return
    active = [f"{port.name}:{port.port}" for port in facts.rdma_ports if port.state == "ACTIVE"]
    chosen = [f"{port.name}:{port.port}" for port in rdma.ports]
    if selected(given["NCCL_IB_HCA"], active or chosen) != set(chosen):
        source = f"{len(chosen)} ports of kind {rdma.kind} carry the GPUs' traffic"
        yield Conflict("NCCL_IB_HCA", given["NCCL_IB_HCA"], "=" + ",".join(chosen), source)


def _of_gid(given: Mapping[str, str], rdma: RdmaChoice) -> Iterator[Conflict]:
    if not rdma.gid_is_seen:
        return
    of_ports = set(rdma.gid_index_per_hca.values())
    if rdma.gid_index is not None:
        of_ports.add(rdma.gid_index)
    listed = ", ".join(map(str, sorted(of_ports)))
    for name in _GID_VARIABLES:
        automatic = given.get(name, "").strip() in ("", "-1")  # NCCL selects the index
        if not automatic and listed and given[name].strip() not in listed.split(", "):
            yield Conflict(
                name, given[name], listed, "the first RoCE v2 entry of the ports' GID tables"
            )
