"""The architecture of a checkpoint in the words of the table [model], and what a recipe says against it. Pure.

In: config.json of a Hugging Face folder and the values that a recipe gives (MODEL_ARGS of Megatron recipes). Out: one
line for each value that differs, with both values; or config.json with the few values that a recipe may override.
Standard library only: the login node asks too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlpost.config.wording import value_text
from rlpost.weights.family import Family, HfConfig

OVERRIDABLE = {
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}
"""What may differ from config.json because no weight changes its shape; with the key that it has there."""

NO_ARCHITECTURE = (
    "no_rope_fusion", "moe_router_dtype", "moe_token_dispatcher_type", "moe_enable_deepep", "moe_grouped_gemm",
    "moe_permute_fusion", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_bias_update_rate",
    "attention_dropout", "hidden_dropout", "override_hf_config",
)  # fmt: skip
"""Names of [model] that say how to compute and not what; those of them that admit one value only need no comparison."""


def head_dim(hf: HfConfig) -> int:
    """Width of a head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def rope(hf: HfConfig) -> Mapping[str, Any]:
    """The rotary embedding's options; transformers 5 keeps them together, 4 spread them."""
    return hf.get("rope_parameters") or (dict(hf) | (hf.get("rope_scaling") or {}))


def rotary_percent(hf: HfConfig) -> float:
    """The part of each head that is rotated."""
    return rope(hf).get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0


def mtp_layers(family: Family, hf: HfConfig) -> int:
    """Layers for multi-token prediction in the checkpoint."""
    return (hf.get("num_nextn_predict_layers") or 0) if family.carries_extra_layers else 0


def mtp_problem(family: Family, hf: HfConfig) -> str | None:
    """Why ``--enable-mtp-training`` cannot train this model; None if it can."""
    count = mtp_layers(family, hf)
    if count == 1:
        return None
    if not family.carries_extra_layers:
        return "--enable-mtp-training: this architecture has no layers for multi-token prediction here; use false"
    return (
        f"--enable-mtp-training: the model's config.json says num_nextn_predict_layers = {count}, and exactly one "
        "layer for multi-token prediction can be trained; use false, or a checkpoint with one"
    )


def architecture(family: Family, hf: HfConfig) -> dict[str, Any]:
    """What a correct recipe would say, by the names of [model]; None for what such a model does not have."""
    fields = family.fields(hf)
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    said = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups < heads,
        "num_query_groups": groups,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "norm_epsilon": hf["rms_norm_eps"],
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": rope(hf)["rope_theta"],
        "rotary_percent": rotary_percent(hf),
        "rotary_interleaved": fields.get("rotary_interleaved", False),
        "vocab_size": hf["vocab_size"],
        "untie_embeddings_and_output_weights": not hf.get("tie_word_embeddings", False),
        "disable_bias_linear": True,
        "add_qkv_bias": fields.get("add_qkv_bias", False),
        "qk_layernorm": fields.get("qk_layernorm", False),
        "post_self_attn_layernorm": family.sandwich_norms,
        "post_mlp_layernorm": family.sandwich_norms,
        "swiglu": True,
        "mtp_num_layers": mtp_layers(family, hf) or None,
    }
    return said | (_experts(fields) if "num_moe_experts" in fields else {})


def _experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": fields["num_moe_experts"],
        "moe_layer_freq": tuple(fields["moe_layer_freq"]),
        "moe_ffn_hidden_size": fields["moe_ffn_hidden_size"],
        "moe_shared_expert_intermediate_size": fields.get("moe_shared_expert_intermediate_size"),
        "moe_router_topk": fields["moe_router_topk"],
        "moe_router_score_function": fields.get("moe_router_score_function", "softmax"),
        "moe_router_pre_softmax": fields["moe_router_pre_softmax"],
        "moe_router_enable_expert_bias": fields.get("moe_router_enable_expert_bias", False),
        "moe_router_topk_scaling_factor": fields.get("moe_router_topk_scaling_factor", 1.0),
        "moe_router_num_groups": fields.get("moe_router_num_groups") or 1,
        "moe_router_group_topk": fields.get("moe_router_group_topk") or 1,
    }


def problems(given: Mapping[str, Any], family: Family, hf: HfConfig) -> list[str]:
    """One line for each value of [model] that config.json contradicts and that is not allowed to win."""
    allowed = tuple(given.get("override_hf_config", ()))
    found = [
        f"--override-hf-config {name}: cannot be overridden, the weights are made for it; only "
        f"{', '.join(OVERRIDABLE)} can"
        for name in allowed
        if name not in OVERRIDABLE
    ]
    compared = {name: value for name, value in given.items() if value is not None and name not in NO_ARCHITECTURE}
    said = architecture(family, hf) if compared else {}
    for name, value in compared.items():
        if name in allowed or _equal(value, said.get(name)):
            continue
        there = f"says {value_text(said[name])}" if said.get(name) is not None else "has no such thing"
        way_out = f", or let it win with --override-hf-config {name}" if name in OVERRIDABLE else ""
        flag = "--" + name.replace("_", "-")
        correct = f"{flag} none" if said.get(name) is None else f"{flag} {value_text(said[name])}"
        found.append(f"{flag} {value_text(value)}, but the model's config.json {there}; use {correct}{way_out}")
    return found


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return bool((tuple(ours) if isinstance(ours, list) else ours) == theirs)


def overridden(given: Mapping[str, Any], hf: HfConfig) -> dict[str, Any]:
    """config.json with the values of [model] that are allowed to win."""
    changed = dict(hf)
    for name in given.get("override_hf_config", ()):
        key, value = OVERRIDABLE.get(name), given.get(name)
        if key is None or value is None:
            continue
        if key in (changed.get("rope_parameters") or {}):
            changed["rope_parameters"] = changed["rope_parameters"] | {key: value}
        else:
            changed[key] = value
    return changed
