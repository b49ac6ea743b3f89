"""Qwen3-Next, and the text models of Qwen3.5 and 3.6, dense and mixture of experts.

Their layers are gated delta nets (arXiv 2412.06464), every fourth one gated attention. Sources:
https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct and
https://huggingface.co/Qwen/Qwen3.5-35B-A3B.
"""

from __future__ import annotations

from rlpost.models import names
from rlpost.models.families.qwen import EXPERTS, gated_shared_expert, mixture
from rlpost.models.family import Family
from rlpost.models.model_types import HfConfig
from rlpost.models.names import Rule, in_layer


def _hybrid(hf: HfConfig) -> dict[str, object]:
    """Fields of both; the factor of a norm is 1 + its weight."""
    return {
        "attention_output_gate": True,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "linear_attention_freq": _linear_layers(hf),
        **{name: hf[name] for name in LINEAR_SIZES},
    }


def _linear_layers(hf: HfConfig) -> list[int]:
    """For each layer 1 if its attention is linear; older configurations give only an interval."""
    kinds = hf.get("layer_types")
    if kinds:
        return [int(kind == "linear_attention") for kind in kinds]
    interval = hf["full_attention_interval"]
    return [int((number + 1) % interval != 0) for number in range(hf["num_hidden_layers"])]


_DEFAULTS: dict[str, object] = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
"""transformers' defaults of both."""
LINEAR_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""Sizes of linear attention, with the same names in config.json and Megatron."""


def _next(hf: HfConfig) -> dict[str, object]:
    return _hybrid(hf) | gated_shared_expert(hf) | mixture(hf)


def _mixture_of_3_5(hf: HfConfig) -> dict[str, object]:
    """Fields of Qwen3.5's mixture of experts.

    Every layer is sparse and the selected scores are divided by their sum: transformers 5.12 has no
    keys for either (``Qwen3_5MoeDecoderLayer``, ``Qwen3_5MoeTopKRouter``).
    """
    return _next({**hf, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []})


def _linear(*projections: Rule) -> tuple[Rule, ...]:
    """Rules of linear attention.

    Qwen3.5 is published with the decay and the norm in float32. The error of a rounded decay compounds
    over the tokens.
    """
    return (
        *projections,
        in_layer("self_attention.conv_weight", "linear_attn.conv1d.weight", layout="linear_qkv"),
        in_layer("self_attention.A_log", "linear_attn.A_log", is_float32=True),
        in_layer("self_attention.dt_bias", "linear_attn.dt_bias"),
        in_layer("self_attention.norm_weight", "linear_attn.norm.weight", is_float32=True),
        in_layer("self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
    )


_ATTENTION = (
    in_layer("input_layernorm.weight", "input_layernorm.weight"),
    in_layer(
        "self_attention.linear_qkv.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkv"),
        layout="gated_qkv",
    ),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    *names.QK_NORM,
    *names.MLP_NORM,
)
_QKVZ, _BA = "self_attention.in_proj_qkvz.weight", "self_attention.in_proj_ba.weight"

_OF_3_5: tuple[Rule, ...] = (
    *names.OUTSIDE_LAYERS,
    *_ATTENTION,
    *_linear(
        in_layer(
            _QKVZ,
            "linear_attn.in_proj_qkv.weight",
            "linear_attn.in_proj_z.weight",
            layout="linear_qkvz",
        ),
        in_layer(
            _BA,
            "linear_attn.in_proj_b.weight",
            "linear_attn.in_proj_a.weight",
            layout="linear_ba",
        ),
    ),
)

FAMILIES: dict[str, Family] = {
    "Qwen3NextForCausalLM": Family(
        rules=(
            *names.OUTSIDE_LAYERS,
            *_ATTENTION,
            *_linear(
                in_layer(_QKVZ, "linear_attn.in_proj_qkvz.weight"),
                in_layer(_BA, "linear_attn.in_proj_ba.weight"),
            ),
            *names.DENSE_MLP,
            *names.EXPERTS,
            *names.GATED_SHARED_EXPERT,
        ),
        fields=_next,
        model_type="qwen3_next",
        page="qwen3-next",
        models="Qwen3-Next-80B-A3B: gated attention in every fourth layer",
        engines_lack_dense_layers=True,
        defaults=_DEFAULTS | EXPERTS | {"norm_topk_prob": True},
        refused=("attention_bias",),
        carries_extra_layers=True,
        engines_lack_nested_rotary_factor=True,
    ),
    "Qwen3_5ForCausalLM": Family(
        rules=(*_OF_3_5, *names.DENSE_MLP),
        fields=_hybrid,
        model_type="qwen3_5_text",
        page="qwen3.5",
        models="dense text models",
        defaults=_DEFAULTS,
        refused=("attention_bias",),
        carries_extra_layers=True,
        engines_lack_nested_rotary_factor=True,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        rules=(*_OF_3_5, *names.EXPERTS, *names.GATED_SHARED_EXPERT),
        fields=_mixture_of_3_5,
        # its config.json has no size of a dense layer; otherwise only names of weights differ
        model_type="qwen3_5_moe_text",
        page="qwen3.5",
        models="text models of 35B-A3B and larger ones: the same layers with experts",
        defaults=_DEFAULTS,
        refused=("attention_bias",),
        carries_extra_layers=True,
        engines_lack_nested_rotary_factor=True,
    ),
}
