"""gpt-oss (arXiv 2508.10925): a mixture of experts with attention sinks.

Every other layer has a sliding window. Layers have biases, and SwiGLU is clamped. Checkpoints are
in bfloat16 or MXFP4.
"""

from __future__ import annotations

from rlpost.errors import WeightError
from rlpost.models import names
from rlpost.models.family import Family, expert_fields, window_fields
from rlpost.models.model_types import HfConfig
from rlpost.models.names import in_layer

SWIGLU_LIMIT = 7.0
"""Bound of the gate from above, and of the other half on both sides.

config.json may repeat it as ``swiglu_limit``; transformers computes with 7 in any case.
"""


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' default of ``rope_parameters``, whose base is ``rope_theta``."""


def _fields(hf: HfConfig) -> dict[str, object]:
    """Each layer is sparse. The router takes the softmax of the selected scores.

    An expert computes ``(up + 1) gate sigmoid(1.702 gate)`` of clamped halves.

    Raises:
        WeightError: config.json says another bound, which engines use and transformers does not.
    """
    if (limit := hf.get("swiglu_limit", SWIGLU_LIMIT)) != SWIGLU_LIMIT:
        raise WeightError(
            f"swiglu_limit = {limit!r} is not supported; use a checkpoint with swiglu_limit = {SWIGLU_LIMIT}"
        )
    return {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": SWIGLU_LIMIT,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        **window_fields(hf, _layer_types(hf)),
        "moe_router_pre_softmax": False,
        **expert_fields(
            hf,
            num_experts=hf["num_local_experts"],
            layer_is_sparse=[True] * hf["num_hidden_layers"],
            ffn="intermediate_size",
        ),
    }


def _layer_types(hf: HfConfig) -> list[str]:
    """Kind of each layer; without them every other layer has a window, the first one included."""
    if kinds := hf.get("layer_types"):
        return list(kinds)
    pattern = ("sliding_attention", "full_attention")
    return [pattern[number % 2] for number in range(hf["num_hidden_layers"])]


FAMILIES: dict[str, Family] = {
    "GptOssForCausalLM": Family(
        rules=(
            *names.OUTSIDE_LAYERS,
            *names.ATTENTION,
            *names.QKV_BIAS,
            *names.MLP_NORM,
            in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
            in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
            in_layer("mlp.router.weight", "mlp.router.weight"),
            in_layer("mlp.router.bias", "mlp.router.bias"),
            names.of_all_experts("linear_fc1.weight", "gate_up_proj", "interleaved_gated"),
            names.of_all_experts("linear_fc1.bias", "gate_up_proj_bias", "interleaved_gated"),
            names.of_all_experts("linear_fc2.weight", "down_proj", "transposed"),
            names.of_all_experts("linear_fc2.bias", "down_proj_bias", "plain"),
        ),
        fields=_fields,
        model_type="gpt_oss",
        page="gpt-oss",
        writes_channels=True,
        models="gpt-oss-20b and 120b: attention sinks, windows, biases, YaRN",
        defaults={"head_dim": 64, "rope_parameters": _YARN},
    ),
}
