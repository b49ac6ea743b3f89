"""Tables of what ``observations`` builds. Tests import them for the names of the rows."""

from __future__ import annotations

from typing import Any

from rlpost.config.groups.perf import FP8_ROWS
from rlpost.config.load import JOBS

AS_GLM45 = {"glm45_355b_fp8", "glm46_355b", "glm47_355b"}
"""Recipes with the layout and the shape of GLM-4.5, which are not built again.

tests/unit/jobs/test_recipes.py and tests/unit/config/test_models.py check that they are equal.
"""
RECIPES = sorted({path.stem for path in (JOBS / "recipes").glob("*.toml")} - AS_GLM45)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # name: (ranks, settings)
    "one": (1, {}),
    "tp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp": (2, {"pipeline_model_parallel_size": 2}),
    "cp": (2, {"context_parallel_size": 2}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, {"expert_model_parallel_size": 2}),
    "etp 1": (
        2,
        LAYOUTS["tp"][1] | {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2},
    ),
}
WITHOUT_ENGINE = ("one", "tp")
"""Layouts at which families are built where TransformerEngine is not installed."""
GPUS = {  # name: (compute capability, flash-attn is installed)
    "A100": ((8, 0), False),
    "A100 with flash-attn": ((8, 0), True),
    "L40S": ((8, 9), False),
    "B200": ((10, 0), False),
    "RTX 6000": ((12, 0), False),
}
ON_GPUS = ("qwen3", "gemma3", "gpt-oss-moe")
NARROW = {
    "main_params_dtype": "fp16",
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "fp8",
    "exp_avg_sq_dtype": "fp16",
}
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
LOCAL_LAYERS = "local layers"
"""Not a setting: the layers are Megatron's own, as with adapters."""
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # name: (family, settings)
    "adam in narrow types": ("qwen3", {"use_precision_aware_optimizer": True, **NARROW}),
    "adam in narrow types, local layers": (
        "qwen3",
        {"use_precision_aware_optimizer": True, LOCAL_LAYERS: True, **NARROW},
    ),
    "experts, every kernel, local layers": (
        "qwen3-moe",
        {
            LOCAL_LAYERS: True,
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
        },
    ),
    "adam on the host": ("qwen3", OFFLOADED),
    "adam on the host, types of its own": (
        "qwen3",
        OFFLOADED | {"use_precision_aware_optimizer": True, **NARROW},
    ),
    "whole adam on every rank": ("qwen3-moe", {"use_distributed_optimizer": False}),
    "experts, no word of kernels": ("qwen3-moe", {}),
    "experts, every kernel": (
        "qwen3-moe",
        {"moe_grouped_gemm": True, "moe_permute_fusion": True},
    ),
    "no rope fusion": ("qwen3", {"no_rope_fusion": True}),
    "fused rope of halves where neighbours rotate": (
        "glm4-0414",
        {"megatron": {"apply_rope_fusion": True}},
    ),
    "fused gradients": ("qwen3", {"megatron": {"gradient_accumulation_fusion": True}}),
    **{
        f"fp8, {recipe}": ("qwen3", {"megatron": {"fp8": "hybrid", "fp8_recipe": recipe}})
        for recipe in FP8_ROWS
    },
    "fused activation that is clamped": (
        "gpt-oss-moe",
        {LOCAL_LAYERS: True, "megatron": {"bias_activation_fusion": True}},
    ),
    "unfused swiglu": ("qwen3", {"megatron": {"bias_activation_fusion": False}}),
    "what Megatron refuses": ("qwen3", {"megatron": {"moe_enable_deepep": True}}),
}
"""Single settings whose effect depends on CUDA or TransformerEngine."""
ON_HOST = ("glm45_355b", "qwen3_30b_a3b")
"""Recipes that request kernels of TransformerEngine and keep Adam in host memory."""
OF_EXPERTS = (*ON_HOST, "qwen3_235b_a22b")
"""Recipes that request these kernels, with Adam in host memory or not."""
