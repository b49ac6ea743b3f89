"""Preflight checks of one host, and comparisons between hosts. Pure.

Input: ``HostFacts``, the job's requirements, the head's observations. Output: ``Check`` values.
Facts that could not be read count as OK: a missing tool never excludes a host.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from bootstrap.check_result import GIB, UNLIMITED, Check, Level
from bootstrap.links.session_folder import is_short_enough
from bootstrap.preflight.gpus import Gpu
from bootstrap.preflight.shared_folder import check_alone
from bootstrap.preflight.table import HeadObservations, HostFacts, Requirements
from common.jit_caches import is_remote

_MAX_SKEW_S = 2.0
_MAX_RENAME_MS = 1000.0
_MAX_FOREIGN_MIB = 512
_WANTED_NOFILE, _NEEDED_NOFILE = 65_535, 4_096
_ENOUGH: Mapping[str, tuple[int, str]] = {
    "CPU": (UNLIMITED, "seconds of CPU for a process, which ends it"),
    "AS": (UNLIMITED, "bytes of address space, of which CUDA reserves more than all memory"),
    "DATA": (UNLIMITED, "bytes of data for a process"),
    "FSIZE": (UNLIMITED, "bytes in a file, checkpoints have more"),
    "NPROC": (16_384, "processes and threads of a user"),
}
"""What is enough of each limit, and what it counts."""
_OLDEST_DRIVERS = {12: 525, 13: 580}
"""Major version of CUDA -> branch of the oldest driver with it (CUDA Toolkit release notes, table
of minimum driver versions for minor version compatibility)."""
_LONG_SESSION = "r12345678.99"  # name of an attempt's folder, of job and restart
_WANTED_TEMP_BYTES, _NEEDED_TEMP_BYTES = 10 * GIB, GIB
# Docker's 64 MiB break NCCL, Ray and SGLang alike
_WANTED_SHM_BYTES, _NEEDED_SHM_BYTES = GIB, GIB // 8
# Hardware errors (NVIDIA, "Xid Errors"): double-bit ECC, row remapping failed, NVLink, fallen off
# the bus, uncontained ECC, GSP timeouts, unrecovered ECC. Most others are bugs of programs.
_HARDWARE_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120, 140})


def check_host(
    facts: HostFacts, requirements: Requirements, seen: HeadObservations | None = None
) -> tuple[Check, ...]:
    """Run every check of one host, in the order of the table."""
    return (
        _reach(facts, seen),
        _gpus(facts, requirements),
        _gpu_health(facts),
        _gpu_mode(facts, requirements),
        _compiler(facts),
        _preload(facts, requirements),
        _net_plugin(facts),
        _nvlink(facts),
        _hcas(facts),
        _gpu_direct(facts),
        _network(facts),
        _memlock(facts),
        _nofile(facts),
        _limits(facts),
        _shm(facts, requirements),
        _temp_dir(facts),
        _ports(facts),
        _folder(facts, seen),
        check_alone(facts.folder_lacks),
        _mounts(facts),
        _clock(seen),
        _head_name(facts, seen),
        *_sandboxes(facts),
    )


def compare_hosts(hosts: Mapping[str, HostFacts]) -> dict[str, tuple[Check, ...]]:
    """Checks of the hosts that differ from the majority, which counts as correct."""
    if len(hosts) < 2:
        return {}
    usual_fs = statistics.mode(facts.folder_fs for facts in hosts.values())
    usual_hcas = statistics.mode(_active_rates(facts) for facts in hosts.values())
    odd: dict[str, tuple[Check, ...]] = {}
    for host, facts in hosts.items():
        host_checks = []
        if facts.folder_fs != usual_fs:
            host_checks.append(
                Check("mounts", "WARN", f"run folder on {facts.folder_fs}, elsewhere on {usual_fs}")
            )
        rates = _active_rates(facts)
        if rates != usual_hcas:
            # Without RDMA a host cannot join the others' communicator; with fewer rails it is slow.
            level: Level = "EXCLUDE_NODE" if usual_hcas and not rates else "WARN"
            listed = f"{_describe_rates(rates)}, elsewhere {_describe_rates(usual_hcas)}"
            host_checks.append(
                Check("hcas", level, f"{listed}: a dead link or another kind of node?")
            )
        if host_checks:
            odd[host] = tuple(host_checks)
    return odd


def check_bandwidth(measured: Mapping[str, float | str], wanted_gbps: float) -> dict[str, Check]:
    """Compare each host's best bus bandwidth with a neighbour (GB/s, or an error)."""
    found: dict[str, Check] = {}
    for host, rate in measured.items():
        if isinstance(rate, str):
            found[host] = Check("bandwidth", "EXCLUDE_NODE", f"not measured: {rate}")
        elif rate < wanted_gbps:
            said = f"{rate:.2f} GB/s with its best neighbour, {wanted_gbps:g} wanted (preflight_bandwidth_gbps)"
            found[host] = Check("bandwidth", "EXCLUDE_NODE", said)
        else:
            found[host] = Check("bandwidth", "OK", f"{rate:.2f} GB/s with its best neighbour")
    return found


def _active_rates(facts: HostFacts) -> tuple[float, ...]:
    usable = [port for port in facts.hcas if port.is_active and port.is_open]
    return tuple(sorted(port.rate_gbps or 0 for port in usable))


def _describe_rates(rates: tuple[float, ...]) -> str:
    counts = {rate: rates.count(rate) for rate in rates}
    return (
        " and ".join(f"{count} active of {rate:g} Gb/s" for rate, count in counts.items())
        or "no active port"
    )


def _reach(facts: HostFacts, seen: HeadObservations | None) -> Check:
    if facts.problem is not None:
        return Check("reach", "EXCLUDE_NODE", facts.problem)
    if seen is None or not seen.via:
        return Check("reach", "OK", "no other node to reach")
    return Check("reach", "OK", f"reached the head from {seen.via}")


def _nvlink(facts: HostFacts) -> Check:
    gpus = facts.gpu_reading.gpus or ()
    if broken := [gpu for gpu in gpus if gpu.fabric in ("not started", "in progress")]:
        said = f"{broken[0].uuid} is not registered with the NVSwitches ({broken[0].fabric})"
        found = f"{said}: is nvidia-fabricmanager running? CUDA would fail with 802"
        return Check("nvlink", "EXCLUDE_NODE", found)
    counts = {gpu.uuid: gpu.num_nvlinks for gpu in gpus if gpu.num_nvlinks is not None}
    if not counts or not any(counts.values()):
        return Check("nvlink", "OK", "none known")
    most = max(counts.values())
    fewer = [
        f"{uuid} has {count} of {most} NVLinks up" for uuid, count in counts.items() if count < most
    ]
    level: Level = "EXCLUDE_NODE" if 0 in counts.values() else "WARN"
    return Check("nvlink", level if fewer else "OK", "; ".join(fewer) or f"{most} up on each GPU")


def _hcas(facts: HostFacts) -> Check:
    down = [port.name for port in facts.hcas if not port.is_active]
    if not facts.hcas:
        return Check("hcas", "OK", "no RDMA device")
    if len(down) == len(facts.hcas):
        return Check("hcas", "WARN", f"no port is active: {', '.join(down)}")
    also = f", {', '.join(down)} down" if down else ""
    if closed := [port.name for port in facts.hcas if not port.is_open]:
        said = f"{', '.join(closed)} cannot be opened: give the container /dev/infiniband{also}"
        return Check("hcas", "WARN", said)
    if facts.limited_ports:
        said = (
            "the first partition is a limited one, whose members do not connect with each other: "
        )
        said += f"{', '.join(facts.limited_ports)}; set NCCL_IB_PKEY to that index (--environment)"
        return Check("hcas", "WARN", said)
    return Check("hcas", "OK", f"{_describe_rates(_active_rates(facts))}{also}")


def _network(facts: HostFacts) -> Check:
    """A conflict never excludes a host: the variable may be right and detection wrong."""
    if facts.network_conflicts is None:
        said = "unknown without another node; see python -m bootstrap.network"
        return Check("network", "OK", said)
    if facts.network_conflicts:
        return Check("network", "WARN", "; ".join(facts.network_conflicts))
    return Check("network", "OK", "no variable conflicts with the detected settings")


def _mounts(facts: HostFacts) -> Check:
    if facts.missing_paths:
        said = (
            f"{', '.join(facts.missing_paths)} not there: a local disk of another host, or a file "
            "system that is not mounted (here, or in the container)?"
        )
        return Check("mounts", "EXCLUDE_NODE", said)
    return Check("mounts", "OK", "all paths exist")


def _gpus(facts: HostFacts, requirements: Requirements) -> Check:
    reading = facts.gpu_reading
    known: dict[str, int] = {}
    if reading.gpus is not None:
        known[reading.source] = sum(gpu.problem is None for gpu in reading.gpus)
    if facts.num_gpus_by_slurm is not None:
        known["Slurm"] = facts.num_gpus_by_slurm
    if not known:
        level: Level = "WARN" if reading.error else "OK"
        said = reading.error or f"{requirements.num_gpus} asked for, their number is unknown"
        return Check("gpus", level, said)
    source = min(known, key=lambda name: known[name])
    if known[source] < requirements.num_gpus:
        why = f" ({reading.error})" if reading.error else ""
        said = f"{known[source]} by {source}, {requirements.num_gpus} asked for{why}"
        return Check("gpus", "EXCLUDE_NODE", said)
    return _cuda(facts) or Check("gpus", "OK", f"{known[source]} by {source}")


def _cuda(facts: HostFacts) -> Check | None:
    """A torch that cannot use the GPUs of this job, which would then train on the CPU."""
    reading, built = facts.gpu_reading, facts.torch_cuda
    if not reading.gpus or not facts.num_gpus_by_slurm or built is None:
        return None
    if not built:
        said = f"{len(reading.gpus)} GPUs, and a torch for the CPU, which would train on it: "
        said += "install the packages for GPUs (docs/install.md), or submit without GPUs"
        return Check("gpus", "FATAL_CONFIG", said)
    if reading.cuda is None or _major(reading.cuda) >= _major(built):
        return None
    oldest = _OLDEST_DRIVERS.get(_major(built))
    newer = f"driver {oldest} or newer" if oldest else "a newer driver"
    said = (
        f"driver {reading.driver or 'of unknown version'} supports CUDA {reading.cuda}, torch is "
    )
    said += f"built for CUDA {built} and sees no GPU with it: install {newer}"
    return Check("gpus", "EXCLUDE_NODE", said)


def _compiler(facts: HostFacts) -> Check:
    """What compiles kernels at run time: Triton's launchers everywhere, the others in engines."""
    built = facts.torch_cuda
    if not facts.gpu_reading.gpus or not built:
        return Check("compiler", "OK", "not needed, or not known")
    if facts.launcher:
        said = f"Triton cannot compile its launchers, without which no rank and no engine computes: {facts.launcher}; "
        said += (
            "install gcc and the headers of Python (python3-dev, python3-devel), or name another "
        )
        said += "interpreter with --python"
        return Check("compiler", "FATAL_CONFIG", said)
    if facts.lacking_tools:
        said = f"no {' and no '.join(facts.lacking_tools)}, with which engines compile kernels when they "
        said += "start: install the package ninja, and g++ (gcc-c++)"
        return Check("compiler", "WARN", said)
    if facts.nvcc is None:
        return Check("compiler", "OK", "nvcc is not known")
    if not facts.nvcc:
        said = "no nvcc: engines compile kernels when they start and fail without it; "
        said += f"install the toolkit of CUDA {built}, or set CUDA_HOME"
        return Check("compiler", "WARN", said)
    if _major(facts.nvcc) != _major(built):
        said = f"nvcc {facts.nvcc}, torch is built for CUDA {built}: kernels that engines compile "
        said += f"may not fit; set CUDA_HOME to a toolkit of CUDA {_major(built)}"
        return Check("compiler", "WARN", said)
    return Check("compiler", "OK", f"nvcc {facts.nvcc}")


def _preload(facts: HostFacts, requirements: Requirements) -> Check:
    """The library with which engines release their memory, loaded in a bare process."""
    if not facts.preload:
        known = "not needed, or not known" if facts.preload is None else "loads"
        return Check("preload", "OK", known)
    said = f"engines that release their memory end at their start: {facts.preload}; "
    said += "put the folder of libcudart into LD_LIBRARY_PATH, or load the CUDA toolkit of torch"
    return Check("preload", "FATAL_CONFIG" if requirements.share_gpus else "WARN", said)


def _net_plugin(facts: HostFacts) -> Check:
    """aws-ofi-nccl, without which NCCL does not reach EFA or Slingshot."""
    if not facts.net_plugin:
        known = "not needed, or not known" if facts.net_plugin is None else "loads"
        return Check("net_plugin", "OK", known)
    said = (
        f"NCCL has no plug-in for libfabric: {facts.net_plugin}; with several nodes it ends, since "
    )
    said += "NCCL_NET asks for the plug-in. Use an image or a module with aws-ofi-nccl, or, at a "
    said += "tenth of the speed, --environment NCCL_NET=Socket"
    return Check("net_plugin", "WARN", said)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _gpu_health(facts: HostFacts) -> Check:
    bad: list[str] = []
    doubtful: list[str] = []
    for gpu in facts.gpu_reading.gpus or ():
        bad += [f"{gpu.uuid} {what}" for what in _faults(gpu)]
        doubtful += [f"{gpu.uuid} {what}" for what in _warnings(gpu)]
    level: Level = "OK"
    if bad or doubtful:
        level = "EXCLUDE_NODE" if bad else "WARN"
    return Check("gpu-health", level, "; ".join([*bad, *doubtful]) or "no faults known")


def _gpu_mode(facts: HostFacts, wanted: Requirements) -> Check:
    """Modes in which a process of the run would find its GPU unavailable."""
    found = []
    for gpu in facts.gpu_reading.gpus or ():
        if gpu.is_mig:
            found.append(f"{gpu.uuid} is split into MIG instances: nvidia-smi -mig 0")
        is_closed = gpu.compute_mode == "prohibited"
        if is_closed or (wanted.share_gpus and (gpu.compute_mode or "").startswith("exclusive")):
            why = "" if is_closed else ", and trainer and engine share it"
            found.append(f"{gpu.uuid} has compute mode {gpu.compute_mode}{why}: nvidia-smi -c 0")
    return Check("gpu-mode", "EXCLUDE_NODE" if found else "OK", "; ".join(found) or "usable")


def _gpu_direct(facts: HostFacts) -> Check:
    """Whether NCCL can use RDMA on GPU memory; without it traffic passes through host memory."""
    has_rdma = any(port.is_active and port.needs_peer_memory for port in facts.hcas)
    if facts.gpu_direct is None or not has_rdma:
        return Check("gpu-direct", "OK", "not needed: no NVIDIA driver or no RDMA device")
    if facts.gpu_direct:
        return Check("gpu-direct", "OK", ", ".join(facts.gpu_direct))
    said = (
        "neither nvidia_peermem nor DMA-BUF: traffic between nodes passes through host memory, 2 "
        "to 4 times slower: modprobe nvidia_peermem, or NVIDIA's open kernel modules on Linux 5.12"
    )
    return Check("gpu-direct", "WARN", said)


def _faults(gpu: Gpu) -> list[str]:
    """Faults that make a GPU unfit.

    A recovery action of the driver takes precedence over error counts.
    """
    faults = []
    if gpu.problem is not None:
        faults.append(f"does not answer: {gpu.problem}")
    if gpu.used_mib is not None and gpu.used_mib > _MAX_FOREIGN_MIB:
        faults.append(f"has {gpu.used_mib} MiB in use by another process")
    if gpu.recovery not in (None, "none"):
        faults.append(f"needs a {gpu.recovery} (recovery action of its driver)")
    if gpu.recovery is None and gpu.ecc_uncorrected:
        faults.append(f"has {gpu.ecc_uncorrected} uncorrected memory errors (reset it)")
    if gpu.remap_failed:
        faults.append("has no spare rows left for broken memory (replace it)")
    return faults


def _warnings(gpu: Gpu) -> list[str]:
    """Faults that may stop a run later.

    A pending remap is harmless (NVIDIA, "GPU Memory Error Management").
    """
    found = []
    if gpu.recovery == "none" and gpu.ecc_uncorrected:
        found.append(f"has had {gpu.ecc_uncorrected} uncorrected memory errors")
    if gpu.remap_pending:
        found.append("waits for a reset to remap broken rows")
    if codes := sorted(_HARDWARE_XIDS.intersection(gpu.xids)):
        found.append(f"had Xid {', '.join(map(str, codes))} within a day (kernel log)")
    return found


def _memlock(facts: HostFacts) -> Check:
    if facts.memlock in (None, UNLIMITED) or not facts.hcas:
        said = "unlimited" if facts.memlock == UNLIMITED else "no RDMA device needs it"
        return Check("memlock", "OK", said)
    found = f"{facts.memlock} bytes, RDMA needs unlimited: LimitMEMLOCK=infinity for slurmd, PropagateResourceLimits"
    return Check("memlock", "EXCLUDE_NODE", found + "Except=MEMLOCK in slurm.conf")


def _nofile(facts: HostFacts) -> Check:
    if facts.nofile in (None, UNLIMITED) or facts.nofile >= _WANTED_NOFILE:
        return Check("nofile", "OK", str(facts.nofile))
    level: Level = "EXCLUDE_NODE" if facts.nofile < _NEEDED_NOFILE else "WARN"
    said = f"{facts.nofile} open files, {_WANTED_NOFILE} wanted: raise the hard limit (ulimit -n)"
    return Check("nofile", level, said)


def _limits(facts: HostFacts) -> Check:
    """Limits below what is enough; they stop a run late or never, so none excludes a host."""
    low = []
    for name, value in facts.limits.items():
        enough, what = _ENOUGH[name]
        if value != UNLIMITED and (enough == UNLIMITED or value < enough):
            low.append(f"{value} {what}: Limit{name}=infinity for slurmd")
    return Check("limits", "WARN" if low else "OK", "; ".join(low) or "none is low")


def _shm(facts: HostFacts, wanted: Requirements) -> Check:
    if facts.shm_free is None:
        return Check("shm", "OK", "unknown")
    needed = max(_NEEDED_SHM_BYTES, wanted.object_store_memory or 0)
    found = f"{facts.shm_free / GIB:.2f} GiB free"
    if facts.shm_free < needed:
        # NCCL on GPUs fails without shared memory; the rest is slow.
        bad: Level = "EXCLUDE_NODE" if facts.gpu_reading.gpus else "WARN"
        said = f"{found} in /dev/shm, {needed / GIB:.2f} needed: mount a larger one"
        return Check("shm", bad, said)
    level: Level = "WARN" if facts.shm_free < _WANTED_SHM_BYTES else "OK"
    return Check("shm", level, found)


def _temp_dir(facts: HostFacts) -> Check:
    # on a network file system sockets and memory maps fail
    if is_remote(facts.temp_fs):
        text = (
            f"{facts.temp_path} is on {facts.temp_fs}; Ray's sockets need a node-local file system"
        )
        return Check("temp-dir", "EXCLUDE_NODE", text)
    if facts.temp_free is None:
        return Check("temp-dir", "OK", "unknown")
    text = f"{facts.temp_free / GIB:.2f} GiB free in {facts.temp_path} ({facts.temp_fs})"
    is_long = not is_short_enough(facts.tmpdir, _LONG_SESSION)
    if is_long:
        text += (
            f"; TMPDIR={facts.tmpdir} is too long for the names of sockets (107 bytes, unix(7)):"
        )
        text += f" temporary files go to a folder in {facts.temp_path}; set a shorter one"
    if facts.temp_free < _NEEDED_TEMP_BYTES:
        said = f"{text}, {_NEEDED_TEMP_BYTES / GIB:.0f} needed: clean it up"
        return Check("temp-dir", "EXCLUDE_NODE", said)
    is_odd = is_long or facts.temp_free < _WANTED_TEMP_BYTES
    return Check("temp-dir", "WARN" if is_odd else "OK", text)


def _ports(facts: HostFacts) -> Check:
    if not facts.taken_ports:
        return Check("ports", "OK", "the job's block is free")
    listed = ", ".join(map(str, facts.taken_ports))
    said = f"{listed} of the job's block taken by another process (ss -ltnp)"
    return Check("ports", "EXCLUDE_NODE", said)


def _folder(facts: HostFacts, seen: HeadObservations | None) -> Check:
    if facts.folder_error is not None:
        said = f"the run folder cannot be written: {facts.folder_error}"
        return Check("folder", "EXCLUDE_NODE", said)
    if seen is not None and seen.canary_seen is False:
        said = "what it writes into the run folder is not seen by the head: not shared"
        return Check("folder", "EXCLUDE_NODE", said)
    if facts.rename_ms is None:
        return Check("folder", "OK", "not checked")
    level: Level = "WARN" if facts.rename_ms > _MAX_RENAME_MS else "OK"
    said = f"{facts.rename_ms:.1f} ms to write and rename a file ({facts.folder_fs})"
    return Check("folder", level, said)


def _clock(seen: HeadObservations | None) -> Check:
    if seen is None or seen.skew_s is None:
        return Check("clock", "OK", "not compared")
    level: Level = "WARN" if abs(seen.skew_s) > _MAX_SKEW_S else "OK"
    return Check("clock", level, f"{seen.skew_s:+.1f} s against the head")


def _head_name(facts: HostFacts, seen: HeadObservations | None) -> Check:
    """At most a warning: agents and Ray use addresses, and only other tools use the name."""
    if facts.head_ips is None:
        return Check("names", "WARN", "the head's name does not resolve in 2 s")
    if not facts.head_ips:
        return Check("names", "WARN", "the head's name does not resolve")
    listed = ", ".join(facts.head_ips)
    if seen is not None and seen.head_ip and seen.head_ip not in facts.head_ips:
        said = f"the head's name leads to {listed}, the head is at {seen.head_ip}"
        return Check("names", "WARN", said)
    return Check("names", "OK", f"the head's name leads to {listed}")


def _sandboxes(facts: HostFacts) -> tuple[Check, ...]:
    """Check the host's features for sandboxes, if the run needs them."""
    offer = facts.sandboxes
    if offer is None:
        return ()
    enroot = "enroot" if offer.has_enroot else "no enroot"
    if offer.namespaces:
        text = (
            f"commands cannot be isolated: {offer.namespaces}; needed are user namespaces "
            "(user.max_user_namespaces above 0, kernel.unprivileged_userns_clone = 1, "
            "kernel.apparmor_restrict_unprivileged_userns = 0; in a container also mounts), or "
            "--sandbox-backend slurm with nodes that have them"
        )
        return (Check("sandboxes", "EXCLUDE_NODE", text),)
    limits = f"limits by cgroup v2 {offer.cgroup}"
    if not offer.cgroup:
        limits = f"limits by rlimits and measurement ({offer.no_cgroup})"
    namespaces = "namespaces" if offer.namespaces is not None else "namespaces not tried"
    return (Check("sandboxes", "OK", f"{namespaces}; {limits}; {enroot}"),)
