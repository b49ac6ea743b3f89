"""Names of weights: Megatron's on one side, Hugging Face's on the other. Pure Python.

In: the name of a Megatron parameter, its layer and expert counted over the whole model. Out: the Hugging Face names it
holds and how they lie in it. ``{layer}`` and ``{expert}`` stand for numbers that are the same on both sides. The rows
below are common to several families; which family has which stands in ``rlpost.weights.families``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlpost.errors import WeightError

Layout = Literal["plain", "vocabulary", "qkv", "gated", "fused_gated"]
"""plain: as it is. vocabulary: rows are tokens, padded at the end. qkv: query, key and value by group. gated: gate
above up, in each tensor-parallel shard. fused_gated: the same, but one tensor for Hugging Face too."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What the layouts of tensors need to know of a model."""

    num_query_groups: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table."""

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout = "plain"


def in_layer(megatron: str, *hugging_face: str, layout: Layout = "plain") -> Rule:
    """A row whose names are counted from the layer."""
    return Rule(
        "decoder.layers.{layer}." + megatron, tuple("model.layers.{layer}." + name for name in hugging_face), layout
    )


OUTSIDE_LAYERS: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocabulary"),
)
ATTENTION: tuple[Rule, ...] = (
    in_layer("input_layernorm.weight", "input_layernorm.weight"),
    in_layer("self_attention.linear_qkv.weight", *(f"self_attn.{part}_proj.weight" for part in "qkv"), layout="qkv"),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
QKV_BIAS: tuple[Rule, ...] = (
    in_layer("self_attention.linear_qkv.bias", *(f"self_attn.{part}_proj.bias" for part in "qkv"), layout="qkv"),
)
QK_NORM: tuple[Rule, ...] = (
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
MLP_NORM: tuple[Rule, ...] = (in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),)


def gated_mlp(megatron: str, hugging_face: str) -> tuple[Rule, ...]:
    """A gated MLP whose weights stand below these prefixes."""
    return (
        in_layer(
            megatron + "linear_fc1.weight",
            hugging_face + "gate_proj.weight",
            hugging_face + "up_proj.weight",
            layout="gated",
        ),
        in_layer(megatron + "linear_fc2.weight", hugging_face + "down_proj.weight"),
    )


DENSE_MLP = gated_mlp("mlp.", "mlp.")
EXPERTS: tuple[Rule, ...] = (
    in_layer("mlp.router.weight", "mlp.gate.weight"),
    *gated_mlp("mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}."),
)
MTP_LAYER: tuple[Rule, ...] = (
    in_layer("eh_proj.weight", "eh_proj.weight"),
    in_layer("enorm.weight", "enorm.weight"),
    in_layer("hnorm.weight", "hnorm.weight"),
    in_layer("final_layernorm.weight", "shared_head.norm.weight"),
)
"""What a layer for multi-token prediction has besides the weights of a decoder layer."""

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")


def canonical(name: str) -> str:
    """The name that a parameter has in a model without TransformerEngine.

    With it the norms before attention and a dense MLP are part of the linear layer that follows, and the experts of a
    rank are one module with a numbered weight for each.
    """
    for fused, alone in _FUSED_NORMS.items():
        if name.endswith("." + fused):
            return name.removesuffix(fused) + alone
    return _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)


_MTP = re.compile(r"(?P<module>mtp\.layers\.\d+)\.(?:transformer_layer\.)?")


def mtp_module(name: str) -> str | None:
    """The module of the layer for multi-token prediction that a parameter belongs to, such as ``mtp.layers.0``."""
    found = _MTP.match(name)
    return found["module"] if found else None


def as_decoder_layer(name: str, layer: int) -> str:
    """The name of a parameter of that layer as if it were decoder layer ``layer``, which it is for Hugging Face."""
    return _MTP.sub(f"decoder.layers.{layer}.", name, count=1)


_NUMBERS = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?:mlp\.experts\.local_experts\.(?P<expert>\d+)\.)?")


def layer_number(name: str) -> int | None:
    """The number after ``decoder.layers.``, if there is one."""
    found = _NUMBERS.match(name)
    return int(found["layer"]) if found else None


def expert_number(name: str) -> int | None:
    """The number after ``local_experts.``, if there is one."""
    found = _NUMBERS.match(name)
    return int(found["expert"]) if found and found["expert"] else None


def renumber(name: str, *, layer: int | None = None, expert: int | None = None) -> str:
    """The name with other numbers where these are given."""
    if layer is not None:
        name = re.sub(r"(?<=^decoder\.layers\.)\d+", str(layer), name)
    return name if expert is None else re.sub(r"(?<=\.local_experts\.)\d+", str(expert), name)


def to_hugging_face(name: str, rules: tuple[Rule, ...]) -> Rule:
    """The rule of a Megatron parameter with its numbers filled in; raises WeightError for a name of no rule."""
    layer, expert = layer_number(name), expert_number(name)
    template = name
    if layer is not None:
        template = template.replace(f".layers.{layer}.", ".layers.{layer}.", 1)
    if expert is not None:
        template = template.replace(f".local_experts.{expert}.", ".local_experts.{expert}.", 1)
    for rule in rules:
        if rule.megatron == template:
            filled = (hf.replace("{layer}", str(layer)).replace("{expert}", str(expert)) for hf in rule.hugging_face)
            return Rule(name, tuple(filled), rule.layout)
    raise WeightError(f"parameter {name!r} of the Megatron model has no Hugging Face name in its family's table")
