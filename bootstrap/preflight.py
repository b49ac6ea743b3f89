"""Is this host fit to run on: a pure judgement over what was read from it.

Comes in: ``HostFacts``, what the job wants, what the head saw of the host. Goes out: ``Check`` values, one table for
people, JSON, and which hosts to use. A fact that could not be read is None and never a reason to leave a host out.

Levels: OK; WARN (goes on, may be slow or break later); EXCLUDE_NODE (this host cannot do it, another one may);
FATAL_CONFIG (no host can, the job asks for something wrong: the same check leaves out every one of several hosts).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Level = Literal["OK", "WARN", "EXCLUDE_NODE", "FATAL_CONFIG"]

GIB = 1 << 30
UNLIMITED = -1
# Network file systems by their names in /proc/mounts; sockets and memory maps in them fail or crawl.
_REMOTE_FS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "9p", "wekafs", "fuse.", "afs", "panfs")
_MAX_SKEW_S = 2.0
_MAX_RENAME_MS = 1000.0
_MAX_FOREIGN_MIB = 512
_WANTED_NOFILE, _NEEDED_NOFILE = 65_535, 4_096
_WANTED_TEMP_BYTES, _NEEDED_TEMP_BYTES = 10 * GIB, GIB
_WANTED_SHM_BYTES, _NEEDED_SHM_BYTES = GIB, GIB // 8  # Docker's 64 MiB break NCCL, Ray and SGLang alike


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its driver describes it; memory in MiB."""

    uuid: str
    used_mib: int | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was read from one host; None is what could not be read."""

    gpus: tuple[Gpu, ...] | None = None  # by nvidia-smi
    num_gpus_by_slurm: int | None = None
    num_rdma_devices: int = 0
    memlock: int | None = None  # bytes, UNLIMITED
    nofile: int | None = None  # UNLIMITED
    shm_free: int | None = None  # bytes
    temp_path: str = ""
    temp_fs: str | None = None
    temp_free: int | None = None  # bytes
    head_ips: tuple[str, ...] | None = None  # what the head's name leads to; None: it takes too long to say
    folder_fs: str | None = None
    folder_error: str | None = None
    rename_ms: float | None = None
    canary: str | None = None
    clock: float | None = None  # seconds of the epoch when the report was sent
    taken_ports: tuple[int, ...] = ()
    problem: str | None = None  # why this host cannot take part, in the words of its agent

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> HostFacts:
        """Raises TypeError when a field is missing from this version or unknown to it."""
        known = dict(raw)
        if known.get("gpus") is not None:
            known["gpus"] = tuple(Gpu(**gpu) for gpu in known["gpus"])
        for name in ("head_ips", "taken_ports"):
            if known.get(name) is not None:
                known[name] = tuple(known[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the job needs of every host."""

    num_gpus: int
    object_store_memory: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the head knows of a host besides its own words."""

    skew_s: float | None = None
    head_ip: str = ""
    canary_seen: bool | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One question about one host. ``found`` says what was got and, unless OK, what is needed and how to get it."""

    name: str
    level: Level
    found: str


def check_host(facts: HostFacts, wanted: Wanted, seen: Seen | None = None) -> tuple[Check, ...]:
    """Every check of one host, in the order of the table."""
    checks = [
        _gpus(facts, wanted),
        _gpu_health(facts),
        _memlock(facts),
        _nofile(facts),
        _shm(facts, wanted),
        _temp_dir(facts),
        _ports(facts),
        _folder(facts, seen),
        _clock(seen),
        _head_name(facts, seen),
    ]
    if facts.problem is not None:
        checks.insert(0, Check("agent", "EXCLUDE_NODE", facts.problem))
    return tuple(checks)


def level_of(checks: Sequence[Check]) -> Level:
    """The worst of them."""
    order: tuple[Level, ...] = ("FATAL_CONFIG", "EXCLUDE_NODE", "WARN")
    return next((level for level in order if any(check.level == level for check in checks)), "OK")


@dataclass(frozen=True, slots=True)
class Preflight:
    """All checks of all hosts, the head first."""

    checks: Mapping[str, tuple[Check, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, checks: Mapping[str, tuple[Check, ...]], folder_fs: Mapping[str, str | None]) -> Preflight:
        """With what only shows when hosts are compared: odd mounts, and failures that all of them share."""
        usual = statistics.mode(folder_fs.values()) if folder_fs else None
        merged = {
            host: (*found, Check("mounts", "WARN", f"run folder on {folder_fs[host]}, elsewhere on {usual}"))
            if host in folder_fs and folder_fs[host] != usual
            else found
            for host, found in checks.items()
        }
        if len(merged) < 2:
            return cls(merged)
        out = [{check.name for check in found if check.level == "EXCLUDE_NODE"} for found in merged.values()]
        shared = set.intersection(*out)
        return cls({host: tuple(_fatal_if(check, shared) for check in found) for host, found in merged.items()})

    @property
    def fatal(self) -> str | None:
        """Why no host can run this, or None."""
        found = {
            check.name: f"{check.name}: {check.found}"
            for checks in self.checks.values()
            for check in checks
            if check.level == "FATAL_CONFIG"
        }
        return "on every host: " + "; ".join(found.values()) if found else None

    @property
    def unfit(self) -> dict[str, str]:
        """Hosts that cannot take part, each with the reasons."""
        return {
            host: "; ".join(f"{c.name}: {c.found}" for c in checks if c.level == "EXCLUDE_NODE")
            for host, checks in self.checks.items()
            if level_of(checks) == "EXCLUDE_NODE"
        }

    def table(self) -> str:
        """Host by check, one letter a cell (``-`` warning, ``X`` unfit), and below it what is not OK."""
        names = list(dict.fromkeys(check.name for checks in self.checks.values() for check in checks))
        width = max([len(host) for host in self.checks] + [4])
        marks = {"OK": "ok", "WARN": "-", "EXCLUDE_NODE": "X", "FATAL_CONFIG": "X"}
        lines = [" ".join(["host".ljust(width), *names])]
        for host, checks in self.checks.items():
            by_name = {check.name: marks[check.level] for check in checks}
            lines.append(" ".join([host.ljust(width), *(by_name.get(name, "ok").ljust(len(name)) for name in names)]))
        return "\n".join([*(line.rstrip() for line in lines), *self._remarks()])

    def to_json(self) -> str:
        """``{"hosts": {HOST: {"level", "checks": [{"name", "level", "found"}]}}}``."""
        hosts = {
            host: {"level": level_of(checks), "checks": [asdict(check) for check in checks]}
            for host, checks in self.checks.items()
        }
        return json.dumps({"hosts": hosts}, indent=1) + "\n"

    def _remarks(self) -> Iterator[str]:
        for host, checks in self.checks.items():
            yield from (f"{host} {c.level} {c.name}: {c.found}" for c in checks if c.level != "OK")


def parse_gpus(listing: str, remapped: str) -> tuple[Gpu, ...]:
    """GPUs from ``nvidia-smi --format=csv,noheader,nounits``.

    Args:
        listing: ``--query-gpu=uuid,memory.used,ecc.errors.uncorrected.volatile.total``; a card without the counter
            answers ``[N/A]``.
        remapped: ``--query-remapped-rows=gpu_uuid,remapped_rows.pending``; empty on cards that have none.
    """
    pending = {row[0]: row[1] for line in remapped.splitlines() if len(row := _cells(line)) == 2}
    rows = [row for line in listing.splitlines() if len(row := _cells(line)) == 3 and row[0].startswith("GPU-")]
    return tuple(Gpu(uuid, _number(used), _number(ecc), _flag(pending.get(uuid))) for uuid, used, ecc in rows)


def visible_gpus(gpus: Sequence[Gpu], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """Those that are this job's: on a node that is shared without device cgroups nvidia-smi lists all.

    Args:
        cuda_visible_devices: the variable as Slurm sets it, indices or UUIDs; anything else selects all.
    """
    names = [name.strip() for name in (cuda_visible_devices or "").split(",")]
    by_name = {str(index): gpu for index, gpu in enumerate(gpus)} | {gpu.uuid: gpu for gpu in gpus}
    return tuple(by_name[name] for name in names) if all(name in by_name for name in names) else tuple(gpus)


def mount_of(path: str, mounts: str) -> str | None:
    """Type of the file system that holds an absolute path, from the text of /proc/mounts."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].encode().decode("unicode_escape")  # a blank is written \040
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and (best is None or len(point) >= best[0]):  # of two on one place the later one is seen
            best = (len(point), fields[2])
    return best[1] if best else None


def _gpus(facts: HostFacts, wanted: Wanted) -> Check:
    views = {"nvidia-smi": None if facts.gpus is None else len(facts.gpus), "Slurm": facts.num_gpus_by_slurm}
    known = {source: count for source, count in views.items() if count is not None}
    if not known:
        return Check("gpus", "OK", f"{wanted.num_gpus} asked for, nobody to count them")
    source = min(known, key=lambda name: known[name])
    if known[source] < wanted.num_gpus:
        return Check("gpus", "EXCLUDE_NODE", f"{known[source]} by {source}, {wanted.num_gpus} asked for")
    return Check("gpus", "OK", f"{known[source]} by {source}")


def _gpu_health(facts: HostFacts) -> Check:
    bad: list[str] = []
    for gpu in facts.gpus or ():
        if gpu.used_mib is not None and gpu.used_mib > _MAX_FOREIGN_MIB:
            bad.append(f"{gpu.uuid} has {gpu.used_mib} MiB in use by somebody else")
        if gpu.ecc_uncorrected:
            bad.append(f"{gpu.uuid} has {gpu.ecc_uncorrected} uncorrected memory errors (reset it)")
        if gpu.remap_pending:
            bad.append(f"{gpu.uuid} waits for a reset to remap broken rows")
    return Check("gpu-health", "EXCLUDE_NODE" if bad else "OK", "; ".join(bad) or "nothing known against them")


def _memlock(facts: HostFacts) -> Check:
    if facts.memlock in (None, UNLIMITED) or facts.num_rdma_devices == 0:
        return Check("memlock", "OK", "unlimited" if facts.memlock == UNLIMITED else "no RDMA device needs it")
    found = f"{facts.memlock} bytes, RDMA needs unlimited: LimitMEMLOCK=infinity for slurmd, PropagateResourceLimits"
    return Check("memlock", "EXCLUDE_NODE", found + "Except=MEMLOCK in slurm.conf")


def _nofile(facts: HostFacts) -> Check:
    if facts.nofile in (None, UNLIMITED) or facts.nofile >= _WANTED_NOFILE:
        return Check("nofile", "OK", str(facts.nofile))
    level: Level = "EXCLUDE_NODE" if facts.nofile < _NEEDED_NOFILE else "WARN"
    return Check(
        "nofile", level, f"{facts.nofile} open files, {_WANTED_NOFILE} wanted: raise the hard limit (ulimit -n)"
    )


def _shm(facts: HostFacts, wanted: Wanted) -> Check:
    if facts.shm_free is None:
        return Check("shm", "OK", "unknown")
    needed = max(_NEEDED_SHM_BYTES, wanted.object_store_memory or 0)
    found = f"{facts.shm_free / GIB:.2f} GiB free"
    if facts.shm_free < needed:
        bad: Level = "EXCLUDE_NODE" if facts.gpus else "WARN"  # NCCL fails; without it all is merely slower
        return Check("shm", bad, f"{found} in /dev/shm, {needed / GIB:.2f} needed: mount a larger one")
    level: Level = "WARN" if facts.shm_free < _WANTED_SHM_BYTES else "OK"
    return Check("shm", level, found)


def _temp_dir(facts: HostFacts) -> Check:
    if facts.temp_fs is not None and facts.temp_fs.startswith(_REMOTE_FS):
        found = f"{facts.temp_path} is on {facts.temp_fs}; Ray's sockets need a file system of the node itself"
        return Check("temp-dir", "EXCLUDE_NODE", found)
    if facts.temp_free is None:
        return Check("temp-dir", "OK", "unknown")
    found = f"{facts.temp_free / GIB:.2f} GiB free in {facts.temp_path} ({facts.temp_fs})"
    if facts.temp_free < _NEEDED_TEMP_BYTES:
        return Check("temp-dir", "EXCLUDE_NODE", f"{found}, {_NEEDED_TEMP_BYTES / GIB:.0f} needed: clean it up")
    return Check("temp-dir", "WARN" if facts.temp_free < _WANTED_TEMP_BYTES else "OK", found)


def _ports(facts: HostFacts) -> Check:
    if not facts.taken_ports:
        return Check("ports", "OK", "the job's block is free")
    listed = ", ".join(map(str, facts.taken_ports))
    return Check("ports", "EXCLUDE_NODE", f"{listed} of the job's block taken by another process (ss -ltnp)")


def _folder(facts: HostFacts, seen: Seen | None) -> Check:
    if facts.folder_error is not None:
        return Check("folder", "EXCLUDE_NODE", f"the run folder cannot be written: {facts.folder_error}")
    if seen is not None and seen.canary_seen is False:
        return Check("folder", "EXCLUDE_NODE", "what it writes into the run folder is not seen by the head: not shared")
    if facts.rename_ms is None:
        return Check("folder", "OK", "not looked at")
    level: Level = "WARN" if facts.rename_ms > _MAX_RENAME_MS else "OK"
    return Check("folder", level, f"{facts.rename_ms:.1f} ms to write and rename a file ({facts.folder_fs})")


def _clock(seen: Seen | None) -> Check:
    if seen is None or seen.skew_s is None:
        return Check("clock", "OK", "not compared")
    level: Level = "WARN" if abs(seen.skew_s) > _MAX_SKEW_S else "OK"
    return Check("clock", level, f"{seen.skew_s:+.1f} s against the head")


def _head_name(facts: HostFacts, seen: Seen | None) -> Check:
    """Never worse than a warning: agents and Ray use addresses, only other people's tools use the name."""
    if facts.head_ips is None:
        return Check("names", "WARN", "the head's name does not resolve in 2 s")
    if not facts.head_ips:
        return Check("names", "WARN", "the head's name does not resolve")
    listed = ", ".join(facts.head_ips)
    if seen is not None and seen.head_ip and seen.head_ip not in facts.head_ips:
        return Check("names", "WARN", f"the head's name leads to {listed}, the head is at {seen.head_ip}")
    return Check("names", "OK", f"the head's name leads to {listed}")


def _fatal_if(check: Check, shared: set[str]) -> Check:
    return replace(check, level="FATAL_CONFIG") if check.level == "EXCLUDE_NODE" and check.name in shared else check


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _flag(text: str | None) -> bool | None:
    return None if text is None else {"yes": True, "1": True, "no": False, "0": False}.get(text.lower())
