"""Sentences about memory that does not suffice: the amount, its bound, and settings that help. Pure.

Input: settings, and the sums of ``estimate``. Output: one line each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import value_of

Remedy = Callable[[Config], str]


def _given(config: Config, name: str) -> str:
    """A setting as a flag, with its value."""
    value = value_of(config, name)
    return flag(name) if value is None else f"{flag(name)} {str(value).lower()}"


def _more_shards(config: Config) -> str:
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tensor, pipeline = (_given(config, name) for name in sizes)
    return f"raise {tensor} or {pipeline}"


def _optimizer(config: Config) -> str:
    if not config.perf.use_distributed_optimizer:
        return f"use {flag('use_distributed_optimizer')}"
    if not config.optimizer.optimizer_cpu_offload:
        return f"use {flag('optimizer_cpu_offload')}, which takes host memory, or more GPUs"
    return f"raise {_given(config, 'optimizer_offload_fraction')}"


def _batch(config: Config) -> str:
    return "max_tokens_per_gpu" if config.perf.use_dynamic_batch_size else "micro_batch_size"


def _activations(config: Config) -> str:
    if config.perf.recompute_granularity != "full":
        return f"use {flag('recompute_granularity')} full"
    longer = _given(config, "context_parallel_size")
    return f"lower {_given(config, _batch(config))}, or raise {longer}"


def _logits(config: Config) -> str:
    vocabulary = _given(config, "tensor_model_parallel_size")
    return f"lower {_given(config, _batch(config))}, or raise {vocabulary}"


def _engine(config: Config) -> str:
    if config.cluster.colocate and not config.offload_rollout:
        return f"use {flag('offload_rollout')}"
    return (
        f"lower {_fraction(config)}, or raise {_given(config, 'rollout_num_gpus_per_engine')} "
        "so that each GPU holds less of the weights"
    )


def _fraction(config: Config) -> str:
    value = config.sglang.server_args.get("mem_fraction_static")
    return "--sglang-mem-fraction-static" + ("" if value is None else f" {value}")


REMEDIES: dict[str, Remedy] = {
    "weights": _more_shards,
    "gradients": _more_shards,
    "optimizer": _optimizer,
    "activations": _activations,
    "logits": _logits,
    "engine": _engine,
    "KV cache": _engine,
    "buffers": lambda config: f"lower {_given(config, 'update_weight_buffer_size')} (bytes)",
    "CUDA, NCCL": lambda config: (
        "use --environment NCCL_NVLS_ENABLE=0, or fewer kinds of parallelism"
    ),
    "critic": _more_shards,
}
"""What helps against each part of a phase."""


def phase_problem(
    config: Config, name: str, parts: Sequence[tuple[str, int]], *, limit: float, gpu_bytes: int
) -> str:
    """A phase whose parts exceed ``limit`` bytes of a GPU, with a remedy for the largest."""
    total = sum(size for _, size in parts)
    largest, size = max(parts, key=lambda part: part[1] if part[0] in REMEDIES else -1)
    return (
        f"{name}: {total / 1e9:.1f} GB, {size / 1e9:.1f} GB of them {largest}; of {gpu_bytes / 1e9:.1f} GB "
        f"(--gpu-memory) {limit / 1e9:.1f} GB may be planned, the rest is lost between allocations; "
        f"{REMEDIES[largest](config)}"
    )


def cache_problem(config: Config, weights: int, tokens: int, longest: int) -> str:
    """An engine whose KV cache of ``tokens`` is too small for one answer of ``longest``."""
    return (
        f"generate: beside {weights / 1e9:.1f} GB of weights the KV cache of an engine holds {max(0, tokens)} "
        f"tokens, and one answer may have {longest}: SGLang gives {_fraction(config)} of the memory that is "
        "free when an engine starts to both; raise it, raise "
        f"{_given(config, 'rollout_num_gpus_per_engine')}, or lower "
        f"{_given(config, 'rollout_max_response_len')}"
    )
