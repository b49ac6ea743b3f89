"""What config.json says of an architecture, and what of it cannot be trained. Pure.

Input: config.json of a Hugging Face folder. Output: sizes, features by the names of Megatron's
MODEL_ARGS, problems; or config.json with the few values that a recipe may override. Standard library
only, because the login node runs it too.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.units import counted
from rlpost.config.model_arguments import OVERRIDABLE
from rlpost.models.families.qwen_hybrid import LINEAR_SIZES
from rlpost.models.family import Family
from rlpost.models.model_types import HfConfig, MegatronFields
from rlpost.models.rope import FULL, SLIDING, local_rope, rope, rope_type

LINEAR = "linear_attention"
"""Kind of the layers with a gated delta net in ``layer_types``."""
SCORES_OF_A_GROUP = 2
"""Experts whose scores rank a group (arXiv 2412.19437, section 2.1.2)."""


def head_dim(hf: HfConfig) -> int:
    """Return the width of an attention head; in latent attention of its part without position."""
    if "kv_lora_rank" in hf:
        return int(hf["qk_nope_head_dim"])
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def dense_ffn(hf: HfConfig) -> int:
    """Return the intermediate size of a dense layer; of an expert if the model has no such key."""
    size = hf.get("intermediate_size")
    return int(hf["moe_intermediate_size"] if size is None else size)


def rotary_percent(hf: HfConfig) -> float:
    """Return the fraction of each head that is rotated."""
    if hf.get("rotary_dim") is not None:
        return float(hf["rotary_dim"] / head_dim(hf))
    return rope(hf).get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0


def rotary_problem(hf: HfConfig) -> str | None:
    """Return why the rotated part of a head is not made of pairs, or not known; None if it is."""
    percent, width = rotary_percent(hf), head_dim(hf)
    rotated = int(width * percent)
    stated = rope(hf).get("partial_rotary_factor")
    if hf.get("rotary_dim") is not None and stated and int(width * stated) != rotated:
        return (
            f"rotary_dim = {rotated} and partial_rotary_factor = {stated:g} of head_dim = {width} contradict each "
            "other: engines read the first, transformers reads the second; correct one of them"
        )
    if "kv_lora_rank" in hf or not rotated % 2:
        return None
    return (
        f"partial_rotary_factor = {percent:g} of head_dim = {width} rotates {rotated} dimensions, which are not "
        "pairs; use a checkpoint in which they are"
    )


def mtp_layers(family: Family, hf: HfConfig) -> int:
    """Return the number of layers for multi-token prediction in the checkpoint."""
    return (hf.get("num_nextn_predict_layers") or 0) if family.carries_extra_layers else 0


def mtp_problem(family: Family, hf: HfConfig) -> str | None:
    """Return why ``--enable-mtp-training`` cannot train this model; None if it can."""
    count = mtp_layers(family, hf)
    if count == 1:
        return None
    if not family.carries_extra_layers:
        return "--enable-mtp-training: this architecture has no layers for multi-token prediction here; use false"
    return (
        f"--enable-mtp-training: the model's config.json says num_nextn_predict_layers = {count}, and exactly one "
        "layer for multi-token prediction can be trained; use false, or a checkpoint with one"
    )


def sharding_problem(
    fields: MegatronFields, *, tensor: int, expert: int, expert_tensor: int, context: int
) -> str | None:
    """Return why the model cannot be sharded this way at all; None if it can.

    Args:
        fields: the family's fields of Megatron's TransformerConfig.
        tensor: ranks that share a layer.
        expert: ranks that share the experts of a layer.
        expert_tensor: ranks that share an expert.
        context: ranks that share a sequence.
    """
    if "linear_attention_freq" in fields:
        if context > 1:
            return (
                f"--context-parallel-size {context}: the linear attention of this model needs whole sequences on a "
                "rank, because each token continues the state of the token before; use --context-parallel-size 1"
            )
        if (heads := fields["linear_num_key_heads"]) % tensor:
            return (
                f"--tensor-model-parallel-size {tensor} does not divide linear_num_key_heads = {heads}; choose a "
                "divisor"
            )
    if "num_moe_experts" in fields and expert == 1 and expert_tensor != tensor:
        # ``allreduce`` of expert weights in tensor_parallel/layers.py of 0.16.1
        return (
            f"--expert-tensor-parallel-size {expert_tensor} with --tensor-model-parallel-size {tensor}: Megatron-core "
            "does not sum the gradients of such experts over their ranks without expert parallelism; leave "
            "--expert-tensor-parallel-size out, or use a larger --expert-model-parallel-size"
        )
    if fields.get("add_bias_linear") and "num_moe_experts" in fields and expert_tensor > 1:
        return (
            f"--expert-tensor-parallel-size {expert_tensor}: the experts of this model have biases, and each rank "
            f"of an expert would add them; use --expert-tensor-parallel-size 1 --expert-model-parallel-size {tensor}"
        )
    return None


def routing_problem(fields: MegatronFields) -> str | None:
    """Return why Megatron-core would route tokens otherwise than the model; None if it would not.

    See ``topk_routing_with_score_function`` and ``group_limited_topk`` in
    ``transformer/moe/moe_utils.py`` of 0.16.1.
    """
    topk, groups = fields.get("moe_router_topk"), fields.get("moe_router_num_groups") or 1
    if topk is None:
        return None
    divides = fields.get("moe_router_score_function") == "sigmoid"
    if topk == 1 and (divides or not fields["moe_router_pre_softmax"]):
        return (
            "num_experts_per_tok = 1 is not supported where the selected scores are divided by their sum "
            "(sigmoid scores, norm_topk_prob): Megatron-core does not divide a single score; use a checkpoint "
            "with num_experts_per_tok = 2 or more"
        )
    if groups > 1 and (ranked := topk // fields["moe_router_group_topk"]) != SCORES_OF_A_GROUP:
        return (
            f"num_experts_per_tok = {topk} with topk_group = {fields['moe_router_group_topk']} is not supported: "
            f"Megatron-core ranks a group by its best {counted(ranked, 'expert')}, the model by its best "
            f"{SCORES_OF_A_GROUP}; use topk_group = {topk // SCORES_OF_A_GROUP}, or n_group = 1"
        )
    return None


def layers_problem(hf: HfConfig, fields: MegatronFields) -> str | None:
    """Return why config.json describes other layers than those that are computed; None if it does not.

    A list that was kept when layers were removed has another length, which transformers refuses
    (``validate_layer_type``); a newer model may have other kinds of layers.
    """
    number = hf["num_hidden_layers"]
    windowed = fields.get("window_attn_skip_freq") or [0] * number
    linear = fields.get("linear_attention_freq") or [0] * number
    sparse = fields.get("moe_layer_freq") or [0] * number
    kinds = zip(windowed, linear, strict=False)
    computed = {
        "layer_types": [
            LINEAR if is_linear else (FULL, SLIDING)[window] for window, is_linear in kinds
        ],
        "mlp_layer_types": [("dense", "sparse")[is_sparse] for is_sparse in sparse],
    }
    for key, ours in computed.items():
        if (listed := hf.get(key)) is None:
            continue
        if len(listed) != number:
            return (
                f"{key} has {counted(len(listed), 'layer')} and num_hidden_layers = {number}; give one entry for "
                "each layer"
            )
        for layer, (kind, mine) in enumerate(zip(listed, ours, strict=False)):
            if kind != mine:
                return (
                    f"{key} has {kind!r} for layer {layer}, which would be computed as {mine!r}; use a "
                    "checkpoint without it"
                )
    if any(windowed) and hf["sliding_window"] < 1:
        return (
            f"sliding_window = {hf['sliding_window']} with layers that have a window; use 1 or more"
        )
    return None


def architecture(family: Family, hf: HfConfig) -> dict[str, object]:
    """Return the features of a model by the names of MODEL_ARGS; None for absent ones."""
    hf = family.resolved(hf)
    fields = family.fields(hf)
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    values = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": dense_ffn(hf),
        "num_attention_heads": heads,
        "group_query_attention": groups < heads,
        "num_query_groups": groups,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "norm_epsilon": hf["rms_norm_eps"],
        "position_embedding_type": _position_embedding(fields, hf),
        "use_rotary_position_embeddings": True,
        "rotary_base": rope(hf)["rope_theta"],
        "local_rotary_base": (local_rope(hf) or {}).get("rope_theta"),
        "rotary_percent": rotary_percent(hf),
        "rotary_interleaved": fields.get("rotary_interleaved", False),
        "vocab_size": hf["vocab_size"],
        "untie_embeddings_and_output_weights": not family.is_tied(hf),
        "disable_bias_linear": not fields.get("add_bias_linear", False),
        "softmax_scale": fields.get("softmax_scale"),
        "softmax_type": fields.get("softmax_type", "vanilla"),
        "sliding_window": hf["sliding_window"] if "window_size" in fields else None,
        "window_attn_skip_freq": tuple(fields.get("window_attn_skip_freq", ())) or None,
        "add_qkv_bias": fields.get("add_qkv_bias", False),
        "qk_layernorm": fields.get("qk_layernorm", False) or family.projection_norms,
        "qk_norm_type": "per_layer" if family.projection_norms else "per_head",
        "post_self_attn_layernorm": family.sandwich_norms,
        "post_mlp_layernorm": family.sandwich_norms,
        "attention_output_gate": fields.get("attention_output_gate", False),
        "apply_layernorm_1p": fields.get("layernorm_zero_centered_gamma", False),
        "linear_attention_freq": tuple(fields.get("linear_attention_freq", ())) or None,
        **{name: fields.get(name) for name in LINEAR_SIZES},
        "swiglu": fields.get("activation_func", "silu") == "silu",
        "quick_geglu": fields.get("activation_func") == "quick_gelu",
        "geglu": fields.get("activation_func") == "gelu_tanh",
        "mtp_num_layers": mtp_layers(family, hf) or None,
    } | _latent(fields)
    return values | (_experts(fields) if "num_moe_experts" in fields else {})


def _position_embedding(fields: MegatronFields, hf: HfConfig) -> str:
    """Return Megatron's name; in latent attention ``rope_type`` says whether there is YaRN."""
    is_scaled = rope_type(rope(hf)) == "yarn" and not fields.get("multi_latent_attention")
    return "yarn" if is_scaled else "rope"


def _latent(fields: MegatronFields) -> dict[str, object]:
    """Return the values of latent attention, and of YaRN in it."""
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    yarn = ("rotary_scaling_factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
    values = {name: fields.get(name) for name in (*sizes, "rope_type")}
    has_yarn = values["rope_type"] == "yarn"
    values |= {name: fields.get(name) if has_yarn else None for name in yarn}
    return values | {"multi_latent_attention": fields.get("multi_latent_attention", False)}


def _experts(fields: MegatronFields) -> dict[str, object]:
    return {
        "num_experts": fields["num_moe_experts"],
        "moe_layer_freq": tuple(fields["moe_layer_freq"]),
        "moe_ffn_hidden_size": fields["moe_ffn_hidden_size"],
        "moe_shared_expert_intermediate_size": fields.get("moe_shared_expert_intermediate_size"),
        "moe_shared_expert_gate": fields.get("moe_shared_expert_gate", False),
        "moe_router_topk": fields["moe_router_topk"],
        "moe_router_score_function": fields.get("moe_router_score_function", "softmax"),
        "moe_router_pre_softmax": fields["moe_router_pre_softmax"],
        "moe_router_enable_expert_bias": fields.get("moe_router_enable_expert_bias", False),
        "moe_router_topk_scaling_factor": fields.get("moe_router_topk_scaling_factor", 1.0),
        "moe_router_num_groups": fields.get("moe_router_num_groups") or 1,
        "moe_router_group_topk": fields.get("moe_router_group_topk") or 1,
    }


def overridden(overrides: Mapping[str, float], hf: HfConfig) -> dict[str, object]:
    """Return config.json with the values of ``--override-hf-config``, by argument."""
    changed = dict(hf)
    for name, value in overrides.items():
        key = OVERRIDABLE[name]
        nested = changed.get("rope_parameters") or {}
        if key in nested.get(FULL, {}):
            changed["rope_parameters"] = nested | {FULL: nested[FULL] | {key: value}}
        elif key in nested:
            changed["rope_parameters"] = nested | {key: value}
        else:
            changed[key] = value
    return changed
