"""Which settings need TransformerEngine on GPUs. Pure.

Input: a ``Config``. Output: the settings, as flags with their values. What the trainer does without TransformerEngine
is decided in ``rlpost.actor``; here is what an image must hold so that nothing is refused or left out there.
"""

from __future__ import annotations

from rlpost.config.tree import Config

_ADAM_TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def transformer_engine_reasons(config: Config) -> list[str]:
    """Settings that need it; empty where a run does without."""
    optimizer, model = config.optimizer, config.model
    is_moe = bool(model.num_experts)
    other = [name for name in _ADAM_TYPES if getattr(optimizer, name) != "fp32"]
    rules = [
        (config.perf.transformer_impl == "transformer_engine", "--transformer-impl transformer_engine"),
        (optimizer.optimizer_cpu_offload, "--optimizer-cpu-offload"),
        (
            optimizer.use_precision_aware_optimizer and bool(other),
            " ".join(f"--{name.replace('_', '-')} {getattr(optimizer, name)}" for name in other),
        ),
        (is_moe and model.moe_grouped_gemm, "--moe-grouped-gemm"),
        (is_moe and model.moe_permute_fusion, "--moe-permute-fusion"),
    ]
    if config.perf.transformer_impl == "local":  # the user does without its modules: Adam's needs remain
        rules = rules[1:3]
    return [reason for needed, reason in rules if needed]
