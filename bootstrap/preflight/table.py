"""Data types of preflight, and the table of its results.

Input: the ``Check`` values and facts of each host. Output: a table, JSON, and the usable hosts. A
fact that could not be read is None and never excludes a host. The checks are in
``preflight.checks``.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bootstrap.check_result import LEVELS, Check, level_of
from bootstrap.preflight.gpus import GpuReading
from common.units import first_names

MARKS = {"OK": "ok", "WARN": "-", "EXCLUDE_NODE": "X", "FATAL_CONFIG": "X"}
"""The table's mark for each level."""


@dataclass(frozen=True, slots=True)
class Hca:
    """One port of an RDMA device.

    Attributes:
        is_open: programs may open the device.
        needs_peer_memory: RDMA to GPU memory needs a kernel module or DMA-BUF beside its driver.
    """

    name: str
    is_active: bool
    rate_gbps: float | None = None
    is_open: bool = True
    needs_peer_memory: bool = True


@dataclass(frozen=True, slots=True)
class SandboxOffer:
    """Features of a host for the sandboxes of agents.

    Attributes:
        namespaces: why commands cannot be isolated; empty if they can, None if unknown.
        cgroup: the delegated cgroup v2; empty without one, for the reason ``no_cgroup``.
        has_enroot: it can unpack .sqsh images.
    """

    namespaces: str | None = ""
    cgroup: str = ""
    no_cgroup: str = ""
    has_enroot: bool = False


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of one host; None: could not be read."""

    gpu_reading: GpuReading = field(default_factory=GpuReading)
    num_gpus_by_slurm: int | None = None
    torch_cuda: str | None = None  # version of CUDA that torch is built for; "" without CUDA
    nvcc: str | None = None  # version of the CUDA compiler; "" without one
    launcher: str | None = None  # why Triton cannot compile its launchers; "" if it can
    lacking_tools: tuple[str, ...] = ()
    net_plugin: str | None = None  # why NCCL's plug-in for libfabric does not load; "" if it does
    preload: str | None = None  # why the library that engines preload does not load; "" if it does
    hcas: tuple[Hca, ...] = ()
    # InfiniBand ports whose first partition is limited: "mlx5_0:1 has a full one at index 1"
    limited_ports: tuple[str, ...] = ()
    gpu_direct: tuple[str, ...] | None = None  # ways of RDMA to GPU memory; None: no NVIDIA driver
    memlock: int | None = None  # bytes, UNLIMITED
    nofile: int | None = None  # UNLIMITED
    limits: Mapping[str, int] = field(default_factory=dict)  # CPU (s), AS (bytes), ...; UNLIMITED
    shm_free: int | None = None  # bytes
    tmpdir: str = ""  # the user's
    temp_path: str = ""  # of Ray's session
    temp_fs: str | None = None
    temp_free: int | None = None  # bytes
    head_ips: tuple[str, ...] | None = None  # of the head's name; None: the lookup timed out
    folder_fs: str | None = None
    folder_error: str | None = None
    rename_ms: float | None = None
    folder_lacks: tuple[str, ...] | None = None  # features; None: not tested
    canary: str | None = None
    missing_paths: tuple[str, ...] = ()  # paths that the run needs on every node
    clock: float | None = None  # seconds of the epoch when the report was sent
    taken_ports: tuple[int, ...] = ()
    network_conflicts: tuple[str, ...] | None = None  # of variables with detected settings
    sandboxes: SandboxOffer | None = None  # None: not asked for
    topology: tuple[str, ...] = ()  # switches or block above this host, the outermost first
    problem: str | None = None  # why this host cannot join, from its agent

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> HostFacts:
        """Raises TypeError if a field is unknown to this version."""
        known = dict(raw)
        known["gpu_reading"] = GpuReading.from_json(known.get("gpu_reading") or {})
        known["hcas"] = tuple(Hca(**port) for port in known.get("hcas") or ())
        if known.get("sandboxes") is not None:
            known["sandboxes"] = SandboxOffer(**known["sandboxes"])
        for name in (
            "head_ips",
            "gpu_direct",
            "lacking_tools",
            "limited_ports",
            "taken_ports",
            "missing_paths",
            "folder_lacks",
            "network_conflicts",
            "topology",
        ):
            if known.get(name) is not None:
                known[name] = tuple(known[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements of the job for every host."""

    num_gpus: int
    object_store_memory: int | None = None
    share_gpus: bool = False  # several of its processes use one GPU


@dataclass(frozen=True, slots=True)
class HeadObservations:
    """The head's observations of a host. ``via``: address and interface that the host used."""

    skew_s: float | None = None
    head_ip: str = ""
    canary_seen: bool | None = None
    via: str = ""


@dataclass(frozen=True, slots=True)
class Preflight:
    """All checks of all hosts, the head first."""

    checks: Mapping[str, tuple[Check, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, checks: Mapping[str, Sequence[Check]], absent: Mapping[str, str] | None = None
    ) -> Preflight:
        """Combine the hosts' checks: a failure that all of several hosts share is fatal.

        Of a single host only a missing path is: it is missing on every host far more often than a
        file system on one.

        Args:
            checks: by host; of several with one name the most severe counts.
            absent: hosts that could not be checked, each with the reason.
        """
        merged = {host: _worst_of_each_name(host_checks) for host, host_checks in checks.items()}
        out = [_names(_excluding(host_checks)) for host_checks in merged.values()]
        shared = set.intersection(*out) if out and not (len(out) == 1 and absent) else set()
        shared &= {"mounts"} if len(out) == 1 else shared
        table = {host: _with_fatal(host_checks, shared) for host, host_checks in merged.items()}
        for host, why in (absent or {}).items():
            table[host] = (Check("reach", "EXCLUDE_NODE", why),)
        return cls(table)

    @property
    def fatal(self) -> str | None:
        """Why no host can run the job, or None."""
        found = {
            check.name: check
            for checks in self.checks.values()
            for check in checks
            if check.level == "FATAL_CONFIG"
        }
        hosts = first_names(list(self.checks))
        where = hosts if len(self.checks) == 1 else f"every host ({hosts})"
        return f"on {where}: {_reasons(found.values())}" if found else None

    @property
    def unfit(self) -> dict[str, str]:
        """Hosts that cannot join, each with the reasons."""
        return {
            host: _reasons(_excluding(checks))
            for host, checks in self.checks.items()
            if level_of(checks) == "EXCLUDE_NODE"
        }

    def table(self, columns: int | None = None) -> str:
        """Table of hosts (``-`` warning, ``X`` unfit, ``?`` unknown), and details.

        Args:
            columns: of the terminal: a wider table continues in further blocks of checks.
        """
        names = list(
            dict.fromkeys(check.name for checks in self.checks.values() for check in checks)
        )
        width = max([len(host) for host in self.checks] + [4])
        lines: list[str] = []
        for block in _blocks(names, None if columns is None else columns - width):
            lines += [*([""] if lines else []), " ".join(["host".ljust(width), *block])]
            for host, checks in self.checks.items():
                by_name = {check.name: MARKS[check.level] for check in checks}
                cells = [by_name.get(name, "?").ljust(len(name)) for name in block]
                lines.append(" ".join([host.ljust(width), *cells]))
        remarks = []
        for host, checks in self.checks.items():
            remarks += [f"{host} {c.level} {c.name}: {c.found}" for c in checks if c.level != "OK"]
        if columns is not None:
            remarks = [line for text in remarks for line in _wrapped(text, columns)]
        return "\n".join([*(line.rstrip() for line in lines), *remarks])

    def to_json(self) -> str:
        """``{"hosts": {HOST: {"level", "checks": [{"name", "level", "found"}]}}}``."""
        hosts = {
            host: {"level": level_of(checks), "checks": list(map(asdict, checks))}
            for host, checks in self.checks.items()
        }
        return json.dumps({"hosts": hosts}, indent=1) + "\n"


def _blocks(names: Sequence[str], width: int | None) -> list[list[str]]:
    """Split the columns into blocks of at most ``width`` characters, a space before each name."""
    blocks: list[list[str]] = [[]]
    used = 0
    for name in names:
        if width is not None and blocks[-1] and used + len(name) + 1 > width:
            blocks.append([])
            used = 0
        blocks[-1].append(name)
        used += len(name) + 1
    return blocks


def _wrapped(text: str, columns: int) -> list[str]:
    return textwrap.wrap(
        text, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _worst_of_each_name(checks: Sequence[Check]) -> tuple[Check, ...]:
    worst: dict[str, Check] = {}
    for check in checks:
        known = worst.get(check.name)
        if known is None or LEVELS.index(check.level) > LEVELS.index(known.level):
            worst[check.name] = check
    return tuple(worst.values())


def _names(checks: Iterable[Check]) -> set[str]:
    return {check.name for check in checks}


def _reasons(checks: Iterable[Check]) -> str:
    return "; ".join(f"{check.name}: {check.found}" for check in checks)


def _excluding(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.level == "EXCLUDE_NODE"]


def _with_fatal(checks: Sequence[Check], shared: set[str]) -> tuple[Check, ...]:
    """Make the checks fatal that exclude every host (``shared`` has their names)."""
    return tuple(
        replace(check, level="FATAL_CONFIG")
        if check.level == "EXCLUDE_NODE" and check.name in shared
        else check
        for check in checks
    )
