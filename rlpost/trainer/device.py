"""The device of a rank: CUDA if available, else the CPU. Other modules query it here.

A rank sees one GPU (its launcher sets CUDA_VISIBLE_DEVICES), so CUDA means device 0.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from common.cpu_affinity import bind_to_gpus, num_cores, read_siblings, threads_of_rank
from common.local_gpus import find_gpu, hidden_gpu_problem, read_local_gpus, visible_names
from rlpost.config.extensions import check_trainer_without_gpus
from rlpost.config.plan.cards import card_of
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.observe.memory import GB, machine, process_gb
from rlpost.trainer.attention_backends import Gpu

logger = logging.getLogger(__name__)

_ENGINE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


def current() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def backend() -> str:
    """Return the torch.distributed backend for ``current()``: nccl or gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def weight_dtype(bf16: bool | None) -> torch.dtype:
    """Return the dtype of the model; None selects bfloat16 on CUDA and float32 on a CPU."""
    if bf16 is None:
        bf16 = torch.cuda.is_available()
    return torch.bfloat16 if bf16 else torch.float32


def gpu() -> Gpu | None:
    """Return what the choice of attention kernels depends on; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_capability(), has_flash_attention())


def capability() -> tuple[int, int] | None:
    """Return the compute capability of the device; None on a CPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def has_flash_attention() -> bool:
    """Return whether TransformerEngine has found a flash-attn that it can use.

    It looks up versions of the distributions flash-attn and flash-attn-3. The module ``flash_attn``
    says nothing: flash-attn-4, which TransformerEngine 2.11 does not know, has a part of it.
    """
    try:
        importlib.import_module(f"{_ENGINE_ATTENTION}.backends")  # looks for them
        versions = importlib.import_module(f"{_ENGINE_ATTENTION}.utils").FlashAttentionUtils
    except (ImportError, AttributeError):
        return False  # no TransformerEngine, or one that has another structure
    return bool(versions.is_installed or versions.v3_is_installed)


def prepare(config: Config) -> None:
    """Select the device, and set the CPU affinity and the number of threads of this process.

    The process is bound to the CPUs next to its device. The number of threads is that of a CPU
    operator. ``torch.set_num_threads`` takes precedence over OMP_NUM_THREADS, which Ray sets to 1
    for an actor without ``num_cpus``. It applies to every thread that calls an operator later.

    Raises:
        ConfigError: this process has a GPU that torch does not see, or none and no extension for
            that.
    """
    if not torch.cuda.is_available():
        problem = hidden_gpu_problem(
            visible(), torch_version=torch.__version__, torch_cuda=torch.version.cuda
        )
        if problem is not None:
            raise ConfigError(problem)
        check_trainer_without_gpus()
    allowed = os.sched_getaffinity(0)
    siblings = read_siblings(allowed)
    if config.cluster.bind_cpus:
        bind_to_gpus(visible(), gpus_per_node=config.cluster.num_gpus_per_node)
    cluster = config.cluster
    # A colocated engine idles while a rank computes; another has a slot of its own.
    has_cuda = torch.cuda.is_available()
    threads = threads_of_rank(
        config.perf.actor_num_threads,
        uses_cpu=config.optimizer.optimizer_cpu_offload or not has_cuda,
        cores=num_cores(allowed, siblings),
        num_sharing=cluster.actor_num_gpus_per_node if has_cuda else cluster.num_gpus_per_node,
        own_cores=num_cores(os.sched_getaffinity(0), siblings),
    )
    torch.set_num_threads(threads)
    if threads > 1:
        logger.info("%d threads for operators on the CPU", threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(current())


def seed(value: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on all devices."""
    random.seed(value)
    np.random.seed(value % 2**32)  # NumPy rejects larger seeds
    torch.manual_seed(value)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of any shape to the device, in the order of its work, without waiting."""
    if torch.cuda.is_available():
        tensor = tensor.pin_memory()  # torch frees the copy when the device has read it
    return tensor.to(current(), non_blocking=True)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of any shape to the host; it may be read after ``synchronise``."""
    return tensor.to("cpu", non_blocking=True)


def synchronise() -> None:
    """Wait for all pending work on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def side_stream() -> AbstractContextManager[object]:
    """Context of a separate CUDA stream.

    For a second thread that works concurrently with the first.
    """
    if not torch.cuda.is_available():
        return nullcontext()
    torch.cuda.set_device(current())  # the current device is a setting per thread
    return torch.cuda.stream(torch.cuda.Stream())


def synchronise_stream() -> None:
    """Wait for the device work that this thread has submitted."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def memory_in_use() -> int:
    """Return the bytes of device memory in use; on a CPU the resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def passing_memory() -> int:
    """Return how much more device memory was in use at the peak since ``memory_use``; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


def free_memory() -> int | None:
    """Return the bytes that an allocation can use at most; None on a CPU.

    They are free on the device, or unused in torch's cache.
    """
    if not torch.cuda.is_available():
        return None
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached


def total_memory() -> int | None:
    """Return the bytes of the device's memory; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(current()).total_memory


def visible() -> str:
    """Return CUDA_VISIBLE_DEVICES of this process; empty if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def position() -> int | None:
    """Return the index of this process's GPU on the host, in PCI bus order; None if unknown."""
    names = visible_names(visible())
    if len(names) != 1:
        return None
    if names[0].isdigit():
        return int(names[0])
    gpus = read_local_gpus()
    gpu = find_gpu(names[0], gpus)
    return None if gpu is None else gpus.index(gpu)


def peak_flops() -> float | None:
    """Return the device's dense bfloat16 FLOP/s; None if ``cards.CARDS`` does not list it."""
    card = card_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if card is None else card.tflops * 1e12


def memory_use() -> dict[str, float]:
    """Return the memory use of this process on host and device, in GB, by metric name.

    Peaks of the device are those since the last call.
    """
    held = {"memory/actor_gb": process_gb(), **machine()}
    if torch.cuda.is_available():
        held["memory/actor_gpu_peak_gb"] = torch.cuda.max_memory_allocated() / GB
        held["memory/actor_gpu_reserved_gb"] = torch.cuda.max_memory_reserved() / GB
        torch.cuda.reset_peak_memory_stats()
    return held
