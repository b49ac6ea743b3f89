"""Current memory use of a process, its host and its GPUs.

Input: a process id, or None for this process.
Output: values by metric name, in GB (10^9 bytes) or as fractions; aggregate them over processes by
the maximum. Reads psutil, and NVML where it is available.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

import psutil

GB = 1e9


def process_gb(pid: int | None = None) -> float:
    """Return the resident memory of a process and its descendants, in GB; 0 if it has ended.

    Shared pages count in each process.
    """
    total = 0
    try:
        one = psutil.Process(pid)
        for process in [one, *one.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it ended after it was listed
                total += process.memory_info().rss
    except psutil.Error:
        return 0.0
    return total / GB


def machine() -> dict[str, float]:
    """Return the used fractions of host memory and of the fullest visible GPU, by all processes."""
    found = {"memory/host_used_frac": psutil.virtual_memory().percent / 100}
    if shares := gpu_used_fracs():
        found["memory/gpu_used_frac"] = max(shares)
    return found


def gpu_used_fracs() -> list[float]:
    """Return the used memory fraction of each visible GPU; empty without NVIDIA's driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, driver or permission: report no GPU
        return []
    try:
        names = range(pynvml.nvmlDeviceGetCount()) if visible is None else visible.split(",")
        used_fracs = []
        for name in names:
            with contextlib.suppress(pynvml.NVMLError):
                held = pynvml.nvmlDeviceGetMemoryInfo(_gpu(str(name).strip()))
                used_fracs.append(held.used / held.total)
        return used_fracs
    finally:
        pynvml.nvmlShutdown()


def _gpu(name: str) -> object:
    import pynvml

    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name.encode())


def most(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the maximum of each value over the reports that have it."""
    largest: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            largest[name] = max(value, largest.get(name, value))
    return largest
