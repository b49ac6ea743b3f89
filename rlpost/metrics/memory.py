"""Current memory use of a process, its host and its GPUs.

Input: nothing, or a process id.
Output: numbers by name, in GB (10^9 bytes) and shares, to be compared over processes by their
maximum. Psutil only, and NVIDIA's management library where there is one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

import psutil

GB = 1e9


def process_gb(pid: int | None = None) -> float:
    """Resident memory of a process and of all it started; what several of them share counts for each."""
    total = 0
    try:
        one = psutil.Process(pid)
        for process in [one, *one.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                total += process.memory_info().rss
    except psutil.Error:
        return 0.0
    return total / GB


def machine() -> dict[str, float]:
    """Shares in use, by whomever: of this machine's memory, and of the fullest GPU that this process may see."""
    found = {"memory/host_used_frac": psutil.virtual_memory().percent / 100}
    if shares := gpu_used_fracs():
        found["memory/gpu_used_frac"] = max(shares)
    return found


def gpu_used_fracs() -> list[float]:
    """Share in use of each GPU that this process may see; none without NVIDIA's driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: then there is nothing to say
        return []
    try:
        names = range(pynvml.nvmlDeviceGetCount()) if visible is None else visible.split(",")
        found = []
        for name in names:
            with contextlib.suppress(pynvml.NVMLError):
                held = pynvml.nvmlDeviceGetMemoryInfo(_gpu(str(name)))
                found.append(held.used / held.total)
        return found
    finally:
        pynvml.nvmlShutdown()


def _gpu(name: str) -> object:
    import pynvml

    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name.encode())


def most(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest of each number over several processes."""
    return {
        name: max(one[name] for one in reports if name in one) for name in dict.fromkeys(k for r in reports for k in r)
    }
