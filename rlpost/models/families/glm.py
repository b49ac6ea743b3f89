"""GLM-4-0414 and GLM-Z1, dense with sandwich norms; GLM-4.5, a mixture of experts.

Source: arXiv 2508.06471 (GLM-4.5).
"""

from __future__ import annotations

from rlpost.errors import WeightError
from rlpost.models import names
from rlpost.models.family import Family, expert_fields, expert_keys
from rlpost.models.model_types import HfConfig, ModelArguments
from rlpost.models.names import in_layer


def _dense(hf: HfConfig) -> dict[str, object]:
    return {"add_qkv_bias": bool(hf.get("attention_bias")), "rotary_interleaved": True}


def mixture(hf: HfConfig) -> dict[str, object]:
    """Sigmoid router whose bias only selects experts; the first layers are dense.

    The bias is not trained.

    Raises:
        WeightError: the selected scores are not divided by their sum, which Megatron always does.
    """
    if not hf["norm_topk_prob"]:
        raise WeightError(
            "norm_topk_prob = false is not supported; use a checkpoint with norm_topk_prob = true"
        )
    num_dense, num_groups = hf["first_k_dense_replace"], hf["n_group"]
    groups = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if num_groups > 1:
        groups = {"moe_router_num_groups": num_groups, "moe_router_group_topk": hf["topk_group"]}
    return {
        "add_qkv_bias": bool(hf.get("attention_bias")),
        "qk_layernorm": bool(hf.get("use_qk_norm")),
        "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_pre_softmax": True,
        **groups,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        **expert_fields(
            hf,
            num_experts=hf["n_routed_experts"],
            layer_is_sparse=[number >= num_dense for number in range(hf["num_hidden_layers"])],
        ),
    }


def _dense_config(arguments: ModelArguments, hf: HfConfig) -> dict[str, object]:
    """Keys of attention; both families state the share of a head that is rotated."""
    share = arguments.get("rotary_percent") or 1.0
    return {
        **hf,
        "partial_rotary_factor": share,
        "rope_parameters": hf["rope_parameters"] | {"partial_rotary_factor": share},
        "attention_bias": bool(arguments.get("add_qkv_bias")),
    }


def _mixture_config(arguments: ModelArguments, hf: HfConfig) -> dict[str, object]:
    return {
        **_dense_config(arguments, hf),
        **mixture_keys(arguments),
        "use_qk_norm": bool(arguments.get("qk_layernorm")),
    }


def mixture_keys(arguments: ModelArguments) -> dict[str, object]:
    """Keys of config.json for a ``mixture``."""
    sparse = [*(arguments.get("moe_layer_freq") or (1,) * arguments["num_layers"]), 1]
    shared = arguments.get("moe_shared_expert_intermediate_size") or 0
    return expert_keys(arguments) | {
        "n_routed_experts": arguments["num_experts"],
        "n_shared_experts": shared // arguments["moe_ffn_hidden_size"],
        "first_k_dense_replace": sparse.index(1),
        "routed_scaling_factor": arguments.get("moe_router_topk_scaling_factor") or 1.0,
        "norm_topk_prob": True,
        "n_group": arguments.get("moe_router_num_groups") or 1,
        "topk_group": arguments.get("moe_router_group_topk") or 1,
    }


EXPERTS: dict[str, object] = {
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
}
"""transformers' defaults of ``Glm4MoeConfig``."""

FAMILIES: dict[str, Family] = {
    "Glm4ForCausalLM": Family(
        rules=(
            *names.OUTSIDE_LAYERS,
            *names.ATTENTION,
            *names.QKV_BIAS,
            *names.MLP_NORM,
            in_layer(
                "self_attention.linear_proj.end_norm.weight", "post_self_attn_layernorm.weight"
            ),
            in_layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", layout="fused_gated"),
            in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
            in_layer("mlp.linear_fc2.end_norm.weight", "post_mlp_layernorm.weight"),
        ),
        fields=_dense,
        hf_config=_dense_config,
        describes=lambda given: (
            given.get("post_self_attn_layernorm") and not given.get("num_experts")
        ),
        model_type="glm4",
        page="glm4",
        models="GLM-4-0414, GLM-Z1: sandwich norms, interleaved partial rotary embedding",
        adapters=True,
        defaults={"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
        sandwich_norms=True,
    ),
    "Glm4MoeForCausalLM": Family(
        rules=(
            *names.OUTSIDE_LAYERS,
            *names.ATTENTION,
            *names.QKV_BIAS,
            *names.QK_NORM,
            *names.MLP_NORM,
            *names.DENSE_MLP,
            *names.SIGMOID_EXPERTS,
            *names.MTP_LAYER,
        ),
        fields=mixture,
        hf_config=_mixture_config,
        describes=lambda given: (
            given.get("num_experts") and given.get("moe_router_score_function") == "sigmoid"
        ),
        model_type="glm4_moe",
        page="glm4.5",
        models="sigmoid router with a bias, shared expert, dense first layers",
        adapters=True,
        defaults=EXPERTS | {"partial_rotary_factor": 0.5},
        carries_extra_layers=True,
    ),
}
