"""Read the facts of this host for the preflight checks. Decides nothing and never raises.

Input: the attempt's folder, Ray's folder, the head's name, the environment. Output: ``HostFacts``.
Every probe is cheap (files, one rename, nvidia-smi if present) and bounded in time, because all
nodes wait for the slowest.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from bootstrap.check_result import UNLIMITED
from bootstrap.links.link import plain_ip
from bootstrap.network.host import read_rdma_devices
from bootstrap.preflight.gpus import read_gpus
from bootstrap.preflight.net_plugin import net_plugin_problem
from bootstrap.preflight.shared_folder import lacks
from bootstrap.preflight.table import Hca, HostFacts, SandboxOffer
from common.build_tools import lacking_tools, launcher_problem
from common.cuda_runtime import preload_problem
from common.delegated_cgroup import delegated_cgroup
from common.files import text_or_empty, write_atomic
from common.jit_caches import mount_of

CANARY_DIR = "canary"
_RESOLVE_S = 2.0
_NAMESPACES_S = 20.0
_NVCC_S = 20.0
_PROJECT = Path(__file__).parents[2]


_OWN_PEER_MEMORY = ("efa", "cxi_core", "cxi_ss1")
"""Drivers of RDMA devices that access GPU memory without another module."""

_OF_A_PROCESS = {
    "CPU": resource.RLIMIT_CPU,
    "AS": resource.RLIMIT_AS,
    "DATA": resource.RLIMIT_DATA,
    "FSIZE": resource.RLIMIT_FSIZE,
    "NPROC": resource.RLIMIT_NPROC,
}
"""Limits that stop engines and saves, by the end of systemd's name for them (LimitCPU)."""


def raise_limits() -> None:
    """Raise the soft limits to the hard ones; child processes inherit them.

    Slurm sets those of the login shell on every node (PropagateResourceLimits). The limit of the
    stack stays: without one, glibc gives threads less.
    """
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, *_OF_A_PROCESS.values())
    for kind in kinds:
        _, hard = resource.getrlimit(kind)
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (hard, hard))


def read_host(
    attempt_dir: Path,
    temp_path: Path,
    head_host: str,
    environ: Mapping[str, str],
    needed_paths: Iterable[Path] = (),
    *,
    sandboxes: bool = False,
) -> HostFacts:
    """Read the facts of this host.

    Writes a canary file to ``attempt_dir``, which the head must see. ``needed_paths`` must exist.
    ``sandboxes``: also try what sandboxes need.
    """
    mounts = text_or_empty(Path("/proc/self/mounts"))
    reading, torch_cuda = read_gpus(environ), read_torch_cuda()
    canary, rename_ms, folder_error = _write_canary(attempt_dir)
    folder_lacks = None if canary is None else _lacks(attempt_dir / CANARY_DIR)
    return HostFacts(
        gpu_reading=reading,
        num_gpus_by_slurm=_num_gpus_by_slurm(environ),
        torch_cuda=torch_cuda,
        nvcc=read_nvcc(environ) if reading.gpus else None,
        launcher=launcher_problem(environ) if reading.gpus and torch_cuda else None,
        lacking_tools=lacking_tools(environ) if reading.gpus else (),
        preload=preload_problem(environ, torch_cuda) if reading.gpus and torch_cuda else None,
        net_plugin=net_plugin_problem(environ) if reading.gpus and _needs_libfabric() else None,
        hcas=tuple(
            Hca(
                row["name"],
                row["state"] == "ACTIVE",
                row["rate_gbps"],
                row["verbs"] is not False,
                row["driver"] not in _OWN_PEER_MEMORY,
            )
            for row in read_rdma_devices()
        ),
        limited_ports=() if environ.get("NCCL_IB_PKEY") else read_limited_ports(),
        gpu_direct=read_gpu_direct(),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE),
        limits={name: _limit(kind) for name, kind in _OF_A_PROCESS.items()},
        shm_free=_free("/dev/shm"),
        tmpdir=environ.get("TMPDIR", ""),
        temp_path=str(temp_path),
        temp_fs=mount_of(str(temp_path), mounts),
        temp_free=_free(str(temp_path)),
        head_ips=_resolve(head_host),
        folder_fs=mount_of(str(attempt_dir), mounts),
        folder_error=folder_error,
        rename_ms=rename_ms,
        folder_lacks=folder_lacks,
        canary=canary,
        missing_paths=tuple(str(path) for path in needed_paths if not os.path.exists(path)),
        sandboxes=read_sandboxes(environ) if sandboxes else None,
    )


def _needs_libfabric() -> bool:
    """Return whether this host has devices that NCCL reaches through libfabric alone."""
    drivers = (str(row["driver"]) for row in read_rdma_devices())
    return os.path.exists("/sys/class/cxi") or any(
        driver.startswith(("efa", "cxi")) for driver in drivers
    )


_FULL_MEMBER = 0x8000  # the bit of a partition key; a limited member lacks it


def read_limited_ports(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the InfiniBand ports whose partition at index 0 is limited and another one is full.

    NCCL takes index 0 unless NCCL_IB_PKEY names another. Two limited members never connect
    (InfiniBand Architecture Specification, volume 1, section 10.9.3).
    """
    ports = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*/pkeys")):
        keys = {}
        for path in folder.iterdir():
            with suppress(ValueError):
                keys[int(path.name)] = int(text_or_empty(path), 16)
        full = sorted(index for index, key in keys.items() if key & _FULL_MEMBER)
        if full and keys.get(0) and 0 not in full:
            port = folder.parent
            ports.append(f"{port.parent.parent.name}:{port.name} has a full one at index {full[0]}")
    return tuple(ports)


def read_gpu_direct(root: Path = Path("/")) -> tuple[str, ...] | None:
    """Return the ways in which RDMA devices can access GPU memory; None without NVIDIA's driver.

    NCCL looks for the same modules (transport/net_ib.cc). DMA-BUF needs Linux 5.12 and the open
    variant of the kernel modules (NVIDIA, "GPUDirect RDMA").
    """
    driver = text_or_empty(root / "proc/driver/nvidia/version")
    if not driver:
        return None
    modules = ("nvidia_peermem", "nv_peer_mem")
    ways = [name for name in modules if (root / "sys/module" / name).exists()]
    release = re.match(r"(\d+)\.(\d+)", text_or_empty(root / "proc/sys/kernel/osrelease"))
    is_new = release is not None and (int(release[1]), int(release[2])) >= (5, 12)
    if is_new and "Open Kernel Module" in driver:
        ways.append("DMA-BUF")
    return tuple(ways)


def read_sandboxes(environ: Mapping[str, str]) -> SandboxOffer:
    """Try namespaces in another process, and look for a delegated cgroup and enroot."""
    command = [sys.executable, "-m", "bootstrap.preflight.namespaces"]
    failed: str | None
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, timeout=_NAMESPACES_S, cwd=_PROJECT
        )
        failed = tried.stdout.strip() or (None if tried.returncode else "")
    except (OSError, subprocess.TimeoutExpired):
        failed = None
    cgroup = delegated_cgroup()
    return SandboxOffer(
        namespaces=failed,
        cgroup=str(cgroup.folder or ""),
        no_cgroup=cgroup.why,
        has_enroot=shutil.which("enroot", path=environ.get("PATH")) is not None,
    )


def _write_canary(attempt_dir: Path) -> tuple[str | None, float | None, str | None]:
    """Write a canary file; return its name and the time in milliseconds, or the error."""
    name = secrets.token_hex(8)
    started_at = time.perf_counter()
    try:
        (attempt_dir / CANARY_DIR).mkdir(mode=0o700, exist_ok=True)
        write_atomic(attempt_dir / CANARY_DIR / name, "seen\n")
    except OSError as error:
        return None, None, str(error)
    return name, 1000 * (time.perf_counter() - started_at), None


def _lacks(folder: Path) -> tuple[str, ...] | None:
    try:
        return lacks(folder)
    except OSError:  # the head may have removed the folder already
        return None


def _num_gpus_by_slurm(environ: Mapping[str, str]) -> int | None:
    """Number of GPUs that Slurm allocated; None if it manages no GPUs."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):  # "8", "h100:8", "a:2,b:2"
        counts = [part.rpartition(":")[2] for part in environ.get(name, "").split(",")]
        if all(count.isdigit() for count in counts):
            return sum(map(int, counts)) or None
    return None


def read_torch_cuda() -> str | None:
    """Version of CUDA that the installed torch is built for; "" for the CPU, None if unknown.

    From torch/version.py, without importing torch.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = text_or_empty(Path(found.origin).with_name("version.py"))
    built = re.search(r"^cuda\b[^=\n]*= *(?:None|['\"]([\d.]+)['\"])", text, re.MULTILINE)
    return None if built is None else built[1] or ""


def read_nvcc(environ: Mapping[str, str]) -> str | None:
    """Version of the CUDA compiler that engines would call; "" without one, None if unknown.

    The places are those of torch.utils.cpp_extension and of FlashInfer.
    """
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    places = [f"{home}/bin/nvcc"] if home else []
    places += [shutil.which("nvcc", path=environ.get("PATH")) or "", "/usr/local/cuda/bin/nvcc"]
    nvcc = next((place for place in places if place and os.access(place, os.X_OK)), None)
    if nvcc is None:
        return ""
    try:
        said = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=_NVCC_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release ([\d.]+)", said.stdout)
    return release[1] if release else None


def _resolve(host: str) -> tuple[str, ...] | None:
    """Addresses of a name; None after a timeout.

    A lookup cannot be interrupted, so a thread runs it.
    """
    addresses: list[tuple[str, ...]] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            answers = []
        addresses.append(tuple(dict.fromkeys(plain_ip(str(answer[4][0])) for answer in answers)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVE_S)
    return addresses[0] if addresses else None


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
