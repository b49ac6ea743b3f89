"""Kernels of engines whose weights can be updated, and that return routes. Pure.

SGLang 0.5.21 resolves some settings by the GPU's architecture when a server starts. On sm100 and
newer it changes the layout of weights after loading, and cannot restore it for an update: experts in
bfloat16 in blocks of flashinfer_trtllm (sgl-project/sglang#27787), scales of FP8 blocks in the
packed exponents of DeepGEMM (sgl-project/sglang#14947). The first update then ends the engine.
flashinfer_trtllm also chooses experts inside its kernel, so no routes are returned, and so does
triton_kernel, which SGLang takes for gpt-oss on every GPU.

Input: the given settings, config.json and the GPU. Output: settings that keep the layout of the
checkpoint. A value of the user takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.models.model_types import EXPERT_KEYS

OLDEST = (10, 0)
"""Compute capability of the first of these GPUs."""
EXPERTS, DENSE = "moe_runner_backend", "fp8_gemm_runner_backend"
TRITON = "triton"
"""Kernels that read weights as they are stored."""


def updatable_kernels(
    server_args: Mapping[str, object], hf_config: Mapping[str, Any], capability: tuple[int, int]
) -> dict[str, object]:
    """Return the settings that are "auto" and must not be.

    Args:
        server_args: the given fields of ServerArgs, with those that follow from the run's settings.
        hf_config: config.json, as ``read_config`` returns it.
        capability: of the engine's GPU.
    """
    quantised = hf_config.get("quantization_config") or {}
    is_fp8 = quantised.get("quant_method") == "fp8"
    is_new = capability >= OLDEST
    returns_routes = server_args.get("enable_return_routed_experts")
    hides_routes = bool(returns_routes) and hf_config.get("model_type") == "gpt_oss"
    kernels = {}
    has_experts = any(hf_config.get(key) for key in EXPERT_KEYS)
    if has_experts and (is_new or hides_routes) and (is_fp8 or not quantised):
        kernels[EXPERTS] = TRITON
    if is_fp8 and is_new:
        kernels[DENSE] = TRITON
    return {name: kernel for name, kernel in kernels.items() if _is_open(server_args.get(name))}


def _is_open(value: object) -> bool:
    return value in (None, "auto")
