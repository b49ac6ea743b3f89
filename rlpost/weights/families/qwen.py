"""Qwen2.5 (arXiv 2412.15115) and Qwen3, dense and mixture of experts (arXiv 2505.09388); Qwen2-MoE
(arXiv 2407.10671). ``qwen_hybrid`` has the families with linear attention.
"""

from __future__ import annotations

from rlpost.weights import names
from rlpost.weights.family import Family, HfConfig, expert_fields

_DENSE = (*names.OUTSIDE_LAYERS, *names.ATTENTION, *names.MLP_NORM, *names.DENSE_MLP)


def mixture(hf: HfConfig) -> dict[str, object]:
    """Layers are sparse by the rule of ``Qwen3MoeDecoderLayer`` in transformers."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    sparse = [
        number not in dense and (number + 1) % step == 0
        for number in range(hf["num_hidden_layers"])
    ]
    return {
        # Softmax over all experts, divided by the sum of the selected, is softmax over the
        # selected.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        **expert_fields(
            hf, num_experts=hf.get("num_experts") or hf["num_local_experts"], layer_is_sparse=sparse
        ),
    }


def _qwen3_moe(hf: HfConfig) -> dict[str, object]:
    return {"qk_layernorm": True, **mixture(hf)}


def gated_shared_expert(hf: HfConfig) -> dict[str, object]:
    """TransformerConfig fields of a shared expert whose output a sigmoid gate scales."""
    return {
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_shared_expert_overlap": False,
    }


def _qwen2_moe(hf: HfConfig) -> dict[str, object]:
    return {
        "add_qkv_bias": hf.get("qkv_bias", True),
        **gated_shared_expert(hf),
        **mixture(hf),
    }


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family(
        rules=(*_DENSE, *names.QKV_BIAS),
        fields=lambda hf: {"add_qkv_bias": True},
        refused=("use_sliding_window",),
    ),
    "Qwen2MoeForCausalLM": Family(
        rules=(*_DENSE, *names.QKV_BIAS, *names.EXPERTS, *names.GATED_SHARED_EXPERT),
        fields=_qwen2_moe,
        refused=("use_sliding_window",),
    ),
    "Qwen3ForCausalLM": Family(
        rules=(*_DENSE, *names.QK_NORM),
        fields=lambda hf: {"qk_layernorm": True},
        refused=("attention_bias", "use_sliding_window"),
    ),
    "Qwen3MoeForCausalLM": Family(
        rules=(*_DENSE, *names.QK_NORM, *names.EXPERTS),
        fields=_qwen3_moe,
        refused=("attention_bias", "use_sliding_window"),
    ),
}
