"""The device a rank computes on: CUDA when there is one, else the CPU. The only place that asks.

A rank sees one GPU (its launcher sets CUDA_VISIBLE_DEVICES), so CUDA means device 0.
"""

from __future__ import annotations

import random

import torch


def current() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def backend() -> str:
    """The name of the collective library for ``current()``: nccl or gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


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
