"""DeepSeek-V3 and R1, Kimi-K2 and GLM-4.7-Flash: latent attention and sigmoid routers.

Sources: arXiv 2412.19437 (DeepSeek-V3), arXiv 2507.20534 (Kimi-K2). The attention is multi-head
latent attention (MLA).

Query, and key with value, are projected to a narrow vector, normalised, and projected to the heads
(arXiv 2405.04434, section 2.1). A part of each query and one key that all heads share carry the
rotary embedding, which rotates adjacent pairs.
"""

from __future__ import annotations

from dataclasses import replace

from rlpost.errors import WeightError
from rlpost.models import names
from rlpost.models.families.glm import EXPERTS, mixture
from rlpost.models.family import Family
from rlpost.models.model_types import HfConfig
from rlpost.models.names import in_layer
from rlpost.models.rope import rope as options_of
from rlpost.models.rope import rope_type

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of the narrow vectors: a constant in transformers, not ``rms_norm_eps``."""

ATTENTION: tuple[names.Rule, ...] = (
    in_layer("input_layernorm.weight", "input_layernorm.weight"),
    in_layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    in_layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    in_layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    in_layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    in_layer("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    in_layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
"""Both sides have the same rows: of each head those without position, then the others.

Models without a query compression have ``linear_q_proj`` instead of its first three weights.
"""


def _fields(hf: HfConfig) -> dict[str, object]:
    """MLA, and the experts of GLM-4.5 with groups.

    Raises:
        WeightError: a key has a value that Megatron-core computes differently.
    """
    if not hf["rope_interleave"]:
        raise WeightError(
            "rope_interleave = false is not supported: Megatron-core rotates adjacent pairs in latent "
            "attention; use a checkpoint with rope_interleave = true"
        )
    return mixture({**hf, "first_k_dense_replace": _num_dense(hf)}) | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        **_rotary(hf),
    }


def _num_dense(hf: HfConfig) -> int:
    """Number of dense layers, all of them first.

    Raises:
        WeightError: a dense layer follows one with experts.
    """
    types = hf.get("mlp_layer_types")
    if types is None:
        return int(hf["first_k_dense_replace"])
    count = types.index("sparse") if "sparse" in types else len(types)
    if "dense" in types[count:]:
        raise WeightError(
            "mlp_layer_types has a dense layer after one with experts, which is not supported; use a "
            "checkpoint whose dense layers come first"
        )
    return count


def _rotary(hf: HfConfig) -> dict[str, object]:
    """Rotary embedding of the part of each head with position.

    YaRN (arXiv 2309.00071) has the temperature of DeepSeek: ``mscale`` scales cosine and sine,
    ``mscale_all_dim`` the softmax.

    Raises:
        WeightError: YaRN with options that Megatron-core lacks.
    """
    options = options_of(hf)
    rope: HfConfig = options
    fields: dict[str, object] = {"rotary_base": rope["rope_theta"]}
    if rope_type(options) != "yarn":
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None or not rope.get("truncate", True):
        raise WeightError(
            "YaRN with attention_factor or truncate = false is not supported in latent attention; use a "
            "checkpoint without them"
        )
    if all_dim and not mscale:
        raise WeightError(
            f"YaRN with mscale_all_dim = {all_dim} and without mscale is not supported; use a checkpoint "
            "with both or with neither"
        )
    # with one of them alone transformers uses neither
    has_both = bool(mscale and all_dim)
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": mscale if has_both else 1.0,
        "mscale_all_dim": all_dim if has_both else 0.0,
    }


_LITE = Family(
    rules=(
        *names.OUTSIDE_LAYERS,
        *ATTENTION,
        *names.MLP_NORM,
        *names.DENSE_MLP,
        *names.SIGMOID_EXPERTS,
        *names.MTP_LAYER,
    ),
    fields=_fields,
    model_type="glm4_moe_lite",
    page="deepseek-v3",
    models="GLM-4.7-Flash: one group of experts",
    defaults=EXPERTS | {"rope_interleave": True, "routed_scaling_factor": 1.8},
    refused=("attention_bias",),
    carries_extra_layers=True,
)
_V3 = {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}

FAMILIES: dict[str, Family] = {
    "Glm4MoeLiteForCausalLM": _LITE,
    "DeepseekV3ForCausalLM": replace(
        _LITE,
        model_type="deepseek_v3",
        models="DeepSeek-V3, V3.1, R1, Kimi-K2: YaRN, sigmoid router with groups",
        defaults={**_LITE.defaults, **_V3},
    ),
}
