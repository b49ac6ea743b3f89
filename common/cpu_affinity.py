"""Binds processes to the CPUs next to their GPUs; chooses a trainer rank's number of threads.

Input: the CPUs of the job step, those next to each GPU, and the number of processes on the node.
Output: a decision; ``bind_to_gpus`` applies it. Invariants: a process is never bound to an empty
set, to a CPU outside the allowed ones, or to fewer than its even share of them. Without NVIDIA's
driver nothing is changed and nothing is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.local_gpus import (
    LocalGpu,
    find_gpu,
    parse_cpu_list,
    read_local_gpus,
    visible_names,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Binding:
    """CPUs to run on, None to leave the process unbound; ``said`` is a log line or empty."""

    cpus: frozenset[int] | None
    said: str = ""


def choose_binding(
    names: Sequence[str], gpus: Sequence[LocalGpu], allowed: Collection[int], *, gpus_per_node: int
) -> Binding:
    """Choose the CPUs of a process with the GPUs ``names`` of CUDA_VISIBLE_DEVICES.

    Args:
        gpus: all visible GPUs.
        allowed: CPUs that the process may use: the cpuset of the job step.
        gpus_per_node: number of GPUs that share the CPUs of the node.
    """
    if not names or not gpus:
        return Binding(None)
    near: set[int] = set()
    for name in names:
        gpu = find_gpu(name, gpus)
        if gpu is None or gpu.cpus is None:
            return Binding(None, f"not bound to CPUs: which are next to GPU {name} is not known")
        near |= gpu.cpus
    cpus = frozenset(near & set(allowed))
    listed = ",".join(names)
    if not cpus:
        return Binding(None, f"not bound to CPUs: none of those next to GPU {listed} is this job's")
    if cpus == frozenset(allowed):
        return Binding(
            None, f"not bound to CPUs: all {len(cpus)} of this job are next to GPU {listed}"
        )
    share = len(allowed) * len(names) // max(1, gpus_per_node)
    if len(cpus) < share:
        has = f"of those next to GPU {listed} this job has {len(cpus)}"
        return Binding(None, f"not bound to CPUs: {has}, less than the even share of {share}")
    return Binding(cpus, f"bound to the {len(cpus)} CPUs next to GPU {listed}: {cpu_list(cpus)}")


def cpu_list(cpus: Iterable[int]) -> str:
    """Format CPUs as the kernel does: ``0-15,64-79``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def threads_of_rank(
    requested: int | None,
    *,
    uses_cpu: bool,
    cores: int,
    num_sharing: int,
    own_cores: int | None = None,
) -> int:
    """Return the number of intra-op CPU threads of a trainer rank.

    Args:
        given: the user's setting; takes precedence.
        uses_cpu: whether the model or the optimizer runs on the CPU. Otherwise one thread feeds
            the GPU, and more would compete with data loading, engines and NCCL.
        cores: cores of the job step on this node, before the rank was bound.
        num_sharing: processes that compute on this node at the same time.
        own_cores: cores that the rank is bound to.
    """
    if requested is not None:
        return requested
    if not uses_cpu:
        return 1
    share = cores // max(1, num_sharing)
    return max(1, share if own_cores is None else min(share, own_cores))


def num_cores(cpus: Collection[int], siblings: Mapping[int, Collection[int]]) -> int:
    """Return the number of physical cores of CPUs; hardware threads of one core count once."""
    return len({frozenset(siblings.get(cpu, (cpu,))) for cpu in cpus})


def read_siblings(cpus: Collection[int]) -> dict[int, frozenset[int]]:
    """Read the sibling threads of each CPU's core; unknown ones are omitted."""
    found = {}
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        with suppress(OSError, ValueError):
            found[cpu] = parse_cpu_list(path.read_text())
    return found


def bind_to_gpus(cuda_visible_devices: str, *, gpus_per_node: int) -> None:
    """Bind all threads of this process to the CPUs next to its GPUs, and log the result."""
    names = visible_names(cuda_visible_devices)
    gpus = read_local_gpus() if names else ()
    binding = choose_binding(names, gpus, os.sched_getaffinity(0), gpus_per_node=gpus_per_node)
    if binding.cpus is not None:
        try:
            _set_affinity(binding.cpus)
        except OSError as error:
            binding = Binding(None, f"not bound to CPUs {cpu_list(binding.cpus)}: {error}")
    if binding.said:
        logger.info("%s", binding.said)


def _set_affinity(cpus: Collection[int]) -> None:
    """Set the affinity of all threads.

    Ray runs an actor's methods in another thread than its constructor, and a new thread inherits
    the affinity of the thread that starts it.
    """
    os.sched_setaffinity(0, cpus)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)
