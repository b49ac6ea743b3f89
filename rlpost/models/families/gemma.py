"""Gemma-3 text models (arXiv 2503.19786).

Five of six layers have a sliding window, with a separate rotary embedding. Attention and MLP have
norms on both sides, and embeddings are scaled.
"""

from __future__ import annotations

from rlpost.errors import WeightError
from rlpost.models import names
from rlpost.models.family import Family, window_fields
from rlpost.models.model_types import HfConfig
from rlpost.models.names import in_layer
from rlpost.models.rope import FULL, SLIDING

ACTIVATION = "gelu_pytorch_tanh"
PATTERN = 6
"""Default of ``sliding_window_pattern``: every sixth layer has no window."""


def _fields(hf: HfConfig) -> dict[str, object]:
    """Fields of all Gemma-3 models.

    The factor of a norm is 1 + its weight. ``query_pre_attn_scalar`` replaces the head width in the
    scale of the softmax.

    Raises:
        WeightError: config.json names another activation, or rope options that are ignored.
        KeyError: a key is missing.
    """
    if (activation := hf.get("hidden_activation", ACTIVATION)) != ACTIVATION:
        raise WeightError(
            f"hidden_activation = {activation!r} is not supported; use a checkpoint with "
            f"hidden_activation = {ACTIVATION!r}"
        )
    nested, scaling = hf.get("rope_parameters"), hf.get("rope_scaling") or {}
    if not nested:
        _ = hf["rope_local_base_freq"]  # of the layers with a window; transformers 5 nests it
    elif FULL not in nested:
        raise WeightError(
            f"rope_parameters = {nested!r} has no {FULL}, and transformers ignores other options for "
            f"this model; nest them in {FULL} and {SLIDING}"
        )
    if scaling and "rope_type" not in scaling:
        raise WeightError(
            f"rope_scaling = {scaling!r} has no rope_type, without which transformers ignores it for "
            "this model; add rope_type, or leave rope_scaling out"
        )
    return {
        "activation_func": "gelu_tanh",
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "softmax_scale": hf["query_pre_attn_scalar"] ** -0.5,
        **window_fields(hf, _layer_types(hf)),
    }


def _layer_types(hf: HfConfig) -> list[str]:
    """Kind of each layer; older configurations give only the pattern, or nothing."""
    if kinds := hf.get("layer_types"):
        return list(kinds)
    pattern = hf.get("sliding_window_pattern", PATTERN)
    return [
        "full_attention" if (number + 1) % pattern == 0 else "sliding_attention"
        for number in range(hf["num_hidden_layers"])
    ]


FAMILIES: dict[str, Family] = {
    "Gemma3ForCausalLM": Family(
        rules=(
            *names.OUTSIDE_LAYERS,
            *names.ATTENTION,
            *names.QK_NORM,
            in_layer(
                "self_attention.linear_proj.end_norm.weight", "post_attention_layernorm.weight"
            ),
            in_layer("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
            *names.DENSE_MLP,
            in_layer("mlp.linear_fc2.end_norm.weight", "post_feedforward_layernorm.weight"),
        ),
        fields=_fields,
        model_type="gemma3_text",
        page="gemma3",
        models="text models 270M and 1B, and the text part of larger ones saved as such",
        adapters=True,
        defaults={"head_dim": 256, "query_pre_attn_scalar": 256},
        # transformers ignores attn_logit_softcapping in the attention of Gemma-3
        refused=("attention_bias", "attn_logit_softcapping", "use_bidirectional_attention"),
        sandwich_norms=True,
        scales_embedding=True,
        tied_by_default=True,
    ),
}
