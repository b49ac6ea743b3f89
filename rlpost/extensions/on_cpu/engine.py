"""Serving without a GPU: SGLang's arguments, and what its process needs.

Input: fields of ServerArgs that the caller sets. Output: these with the values that a CPU needs, and
a process in which SGLang can be imported (``sglang_on_cpu``).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from common.cpu_affinity import num_cores, read_siblings
from rlpost.config.server_arg_values import POOL_WITHOUT_GPUS
from rlpost.extensions.on_cpu.engine_memory import memory_fraction

STAND_INS = Path(__file__).with_name("sglang_on_cpu")
WITHOUT_CUDA: Mapping[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "lora_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_custom_all_reduce": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # an idle scheduler would spin on a core that the trainer needs
    "max_total_tokens": POOL_WITHOUT_GPUS,
    "max_running_requests": 64,
    # A forward pass on a CPU beside other load may take longer than SGLang's 300 s, after which its
    # scheduler ends itself.
    "watchdog_timeout": 1800.0,
}
ONLY_ON_CUDA: Mapping[str, object] = {
    "enable_memory_saver": False,
    # The plain-torch attention and experts of SGLang support tensor parallelism only.
    "enable_dp_attention": False,
    "enable_dp_lm_head": False,
    "dp_size": 1,
    "ep_size": 1,
    "moe_dense_tp_size": None,
}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


def prepare_engine(settings: Mapping[str, Any], gpus_per_node: int | None) -> dict[str, object]:
    """Prepare this process for SGLang's import; return the fields of ServerArgs.

    ``settings``: those of the caller, of SGLang's types. The slots of a node (``gpus_per_node``)
    share its cores. Raises ConfigError if the model needs more than the free memory.
    """
    use_stand_ins(int(settings.get("tp_size", 1)))
    use_threads(gpus_per_node)
    keep_memory()
    start_by_fork()
    fields = engine_settings(settings)
    if (folder := Path(str(settings["model_path"]))).is_dir():
        fraction = memory_fraction(folder, fields, psutil.virtual_memory().available)
        fields = {"mem_fraction_static": fraction} | fields
    return fields


def engine_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of ServerArgs: those of the caller, but for what needs CUDA."""
    return {**WITHOUT_CUDA, **settings, **ONLY_ON_CUDA}


def use_stand_ins(num_ranks: int = 1) -> None:
    """Make the CPU stand-ins importable here and in SGLang's processes.

    All ranks share all cores: SGLang rejects more ranks than NUMA nodes unless the cores of each
    rank are given.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * num_ranks))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{STAND_INS}:{inherited}" if inherited else str(STAND_INS)
    sys.path.insert(0, str(STAND_INS))
    # SGLang's debug dumper imports Megatron-core where it is installed; an engine does not need it.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # compiling the MoE router costs more than it saves
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def keep_memory() -> None:
    """Make malloc reuse freed memory instead of returning it to the system.

    CUDA's allocator does so too. SGLang allocates memory for each bucket of weights; page faults on
    fresh memory would dominate the update.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def start_by_fork() -> None:
    """Fork SGLang's processes from this one, which has imported everything.

    Imports dominate their start. SGLang sets "spawn", because CUDA does not survive a fork.
    """
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_args, **_options: None


def use_threads(num_sharing: int | None) -> None:
    """Give the operators of each process this share of the cores, or one thread if it is None.

    ``num_sharing`` processes compute on this node at the same time.
    """
    import torch

    cpus = os.sched_getaffinity(0)
    cores = num_cores(cpus, read_siblings(cpus))
    threads = 1 if num_sharing is None else max(1, cores // num_sharing)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray sets it to 1
    torch.set_num_threads(threads)  # torch read the variable at import
