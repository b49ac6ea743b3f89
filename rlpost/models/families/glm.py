"""GLM-4-0414 and GLM-Z1, dense with sandwich norms; GLM-4.5, a mixture of experts.

Source: arXiv 2508.06471 (GLM-4.5).
"""

from __future__ import annotations

from rlpost.errors import WeightError
from rlpost.models import names
from rlpost.models.family import Family, expert_fields
from rlpost.models.model_types import HfConfig
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
        model_type="glm4_moe",
        page="glm4.5",
        models="sigmoid router with a bias, shared expert, dense first layers",
        adapters=True,
        defaults=EXPERTS | {"partial_rotary_factor": 0.5},
        carries_extra_layers=True,
    ),
}
