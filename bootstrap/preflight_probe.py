"""Reads the facts of this host that ``preflight`` judges. Nothing here decides, and nothing raises.

Comes in: the attempt's folder, Ray's folder, the head's name, the environment. Goes out: ``HostFacts``. Every look is
cheap (files, one rename, nvidia-smi where there is one) and bounded, for every node of the job waits for the slowest.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bootstrap.files import write_atomic
from bootstrap.link import plain_ip
from bootstrap.preflight import UNLIMITED, Gpu, HostFacts, mount_of, parse_gpus, visible_gpus

CANARY_DIR = "canary"
_NVIDIA_SMI_S = 20.0  # a first call without persistence mode loads the driver
_RESOLVE_S = 2.0


def raise_limits() -> None:
    """Soft limits of open files and locked memory up to the hard ones; Ray and RDMA inherit them from the agent."""
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        _, hard = resource.getrlimit(kind)
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (hard, hard))


def read_host(attempt_dir: Path, temp_path: Path, head_host: str, environ: Mapping[str, str]) -> HostFacts:
    """Look at this host. ``attempt_dir`` gets a canary with this host's name, for the head to see."""
    mounts = _text("/proc/self/mounts")
    canary, rename_ms, folder_error = _write_canary(attempt_dir)
    return HostFacts(
        gpus=_gpus(environ),
        num_gpus_by_slurm=_num_gpus_by_slurm(environ),
        num_rdma_devices=_num_entries("/sys/class/infiniband"),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE),
        shm_free=_free("/dev/shm"),
        temp_path=str(temp_path),
        temp_fs=mount_of(str(temp_path), mounts),
        temp_free=_free(str(temp_path)),
        head_ips=_resolve(head_host),
        folder_fs=mount_of(str(attempt_dir), mounts),
        folder_error=folder_error,
        rename_ms=rename_ms,
        canary=canary,
    )


def _write_canary(attempt_dir: Path) -> tuple[str | None, float | None, str | None]:
    """Name of a file that now lies in the folder, milliseconds it took, or what went wrong."""
    name = secrets.token_hex(8)
    started_at = time.perf_counter()
    try:
        (attempt_dir / CANARY_DIR).mkdir(mode=0o700, exist_ok=True)
        write_atomic(attempt_dir / CANARY_DIR / name, "seen\n")
    except OSError as error:
        return None, None, str(error)
    return name, 1000 * (time.perf_counter() - started_at), None


def _gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    """None where there is no NVIDIA driver; empty where its tool fails, for then it has no GPU to offer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    listing = _csv(tool, "--query-gpu=uuid,memory.used,ecc.errors.uncorrected.volatile.total")
    gpus = parse_gpus(listing, _csv(tool, "--query-remapped-rows=gpu_uuid,remapped_rows.pending"))
    return visible_gpus(gpus, environ.get("CUDA_VISIBLE_DEVICES"))


def _csv(tool: str, query: str) -> str:
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=_NVIDIA_SMI_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _num_gpus_by_slurm(environ: Mapping[str, str]) -> int | None:
    """None where Slurm gave none: then GPUs are not its business, or there are only logical ones."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):  # "8", "h100:8", "a:2,b:2"
        counts = [part.rpartition(":")[2] for part in environ.get(name, "").split(",")]
        if all(count.isdigit() for count in counts):
            return sum(map(int, counts)) or None
    return None


def _resolve(host: str) -> tuple[str, ...] | None:
    """Addresses of a name; None when a resolver keeps us waiting. It cannot be interrupted, hence a thread to leave."""
    found: list[tuple[str, ...]] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            answers = []
        found.append(tuple(dict.fromkeys(plain_ip(str(answer[4][0])) for answer in answers)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVE_S)
    return found[0] if found else None


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _num_entries(path: str) -> int:
    try:
        return len(os.listdir(path))
    except OSError:
        return 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
