"""The device a rank computes on: CUDA when there is one, else the CPU. The only place that asks.

A rank sees one GPU (its launcher sets CUDA_VISIBLE_DEVICES), so CUDA means device 0.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch


def current() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def backend() -> str:
    """The name of the collective library for ``current()``: nccl or gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def weight_dtype(bf16: bool | None) -> torch.dtype:
    """What the model computes in: as asked, or bfloat16 on CUDA and float32 on a CPU."""
    return torch.bfloat16 if (torch.cuda.is_available() if bf16 is None else bf16) else torch.float32


def prepare(*, num_threads: int) -> None:
    """Select the device and limit the threads of an operator on the CPU."""
    torch.set_num_threads(num_threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(current())


def seed(value: int) -> None:
    """Seed Python's and torch's generators, on all devices."""
    random.seed(value)
    torch.manual_seed(value)


def synchronise() -> None:
    """Wait for all work under way on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_bytes() -> int:
    """The most bytes of device memory this process has held in tensors; 0 on a CPU, where nobody counts them."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def memory_in_use() -> int:
    """Bytes that this process holds: of device memory, or on a CPU of the machine's (resident)."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def visible() -> str:
    """The GPU that this process was given, as CUDA_VISIBLE_DEVICES names it; empty without."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
