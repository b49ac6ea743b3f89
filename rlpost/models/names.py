"""Map names of weights between Megatron and Hugging Face. Pure Python.

Input: the name of a Megatron parameter, with layer and expert numbered over the whole model.
Output: the Hugging Face tensors that it contains, and their layout. ``{layer}`` and ``{expert}``
are placeholders for numbers that are equal on both sides. The rules below are common to several
families; ``rlpost.models.families`` has the rules of each family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from rlpost.errors import WeightError

Layout = Literal[
    "plain", "vocabulary", "qkv", "gated", "fused_gated", "transposed", "interleaved_gated",
    "transposed_gated", "gated_qkv", "linear_qkv", "linear_qkvz", "linear_ba",
]  # fmt: skip
"""How Hugging Face tensors become one parameter.

plain: unchanged. vocabulary: rows are tokens, padded at the end. qkv: query, key and value by
group. gated: gate, then up, in each tensor-parallel shard. fused_gated: the same, but also one
tensor in the Hugging Face folder. transposed: input before output. interleaved_gated: one tensor,
in which gate and up alternate along the last axis; a matrix is also transposed. transposed_gated:
one transposed tensor with gate, then up. gated_qkv: by group
its queries, their gates, key and value; in the tensor of the queries each head is followed by its
gate. linear_qkv, linear_qkvz, linear_ba: weights of linear attention by key head; in the tensors by
their kind.
"""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Dimensions of a model that the layouts depend on."""

    num_query_groups: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    linear_key_heads: int = 0
    linear_key_dim: int = 0
    linear_value_heads: int = 0
    linear_value_dim: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """The Hugging Face tensors of one Megatron parameter."""

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout = "plain"
    is_stacked: bool = False
    """Whether the one Hugging Face tensor holds this parameter of all experts, by expert."""
    is_float32: bool = False
    """Whether it is float32 in a model of 16 bits, everywhere: held, trained, sent, exported."""


def in_layer(
    megatron: str,
    *hugging_face: str,
    layout: Layout = "plain",
    is_stacked: bool = False,
    is_float32: bool = False,
) -> Rule:
    """Return a rule for names relative to a layer."""
    return Rule(
        "decoder.layers.{layer}." + megatron,
        tuple("model.layers.{layer}." + name for name in hugging_face),
        layout,
        is_stacked,
        is_float32,
    )


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with another prefix, by the first of ``prefixes`` that it has."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


def of_all_experts(megatron: str, hugging_face: str, layout: Layout) -> Rule:
    """Return the rule of an expert's parameter; one tensor holds those of all experts."""
    return in_layer(
        "mlp.experts.local_experts.{expert}." + megatron,
        "mlp.experts." + hugging_face,
        layout=layout,
        is_stacked=True,
    )


OUTSIDE_LAYERS: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocabulary"),
)
ATTENTION: tuple[Rule, ...] = (
    in_layer("input_layernorm.weight", "input_layernorm.weight"),
    in_layer(
        "self_attention.linear_qkv.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkv"),
        layout="qkv",
    ),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
QKV_BIAS: tuple[Rule, ...] = (
    in_layer(
        "self_attention.linear_qkv.bias",
        *(f"self_attn.{part}_proj.bias" for part in "qkv"),
        layout="qkv",
    ),
)
QK_NORM: tuple[Rule, ...] = (
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
MLP_NORM: tuple[Rule, ...] = (
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)


def gated_mlp(megatron: str, hugging_face: str) -> tuple[Rule, ...]:
    """Return the rules of a gated MLP with these prefixes."""
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
GATED_SHARED_EXPERT: tuple[Rule, ...] = (
    *gated_mlp("mlp.shared_experts.", "mlp.shared_expert."),
    in_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)
SIGMOID_EXPERTS: tuple[Rule, ...] = (
    *EXPERTS,
    in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    *gated_mlp("mlp.shared_experts.", "mlp.shared_experts."),
)
"""Experts and a shared expert, with a bias that only selects experts (DeepSeek-V3, GLM-4.5)."""
MTP_LAYER: tuple[Rule, ...] = (
    in_layer("eh_proj.weight", "eh_proj.weight"),
    in_layer("enorm.weight", "enorm.weight"),
    in_layer("hnorm.weight", "hnorm.weight"),
    in_layer("final_layernorm.weight", "shared_head.norm.weight"),
)
"""Weights of a layer for multi-token prediction in addition to those of a decoder layer."""

LOADED_TOGETHER = (
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
)
"""Weights of a layer that an engine must get in one bucket.

SGLang fuses the two if one call of its loader has both, and otherwise drops them without an error
(``cached_a_proj`` in ``deepseek_weight_loader.py`` of 0.5.21).
"""

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def canonical(name: str) -> str:
    """Return the name of a parameter in a model without TransformerEngine.

    TransformerEngine fuses the norms before attention and a dense MLP with the next linear layer.
    Its experts of a rank are one module with numbered weights.
    """
    for fused, alone in _FUSED_NORMS.items():
        if name.endswith("." + fused):
            return name.removesuffix(fused) + alone
    return _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\3.\1.\2", name)


_MTP = re.compile(r"(?P<module>mtp\.layers\.\d+)\.(?:transformer_layer\.)?")


def place_in_layer(name: str) -> int:
    """Return the rank of a parameter in the order of its layer: ``LOADED_TOGETHER``, the others."""
    for place, together in enumerate(LOADED_TOGETHER):
        if name.endswith(together):
            return place
    return len(LOADED_TOGETHER)


def mtp_module(name: str) -> str | None:
    """Return the MTP module of a parameter, such as ``mtp.layers.0``; None for others."""
    found = _MTP.match(name)
    return found["module"] if found else None


def as_decoder_layer(name: str, layer: int) -> str:
    """Rename a parameter of an MTP layer to decoder layer ``layer``.

    ``layer`` is its number in Hugging Face folders.
    """
    return _MTP.sub(f"decoder.layers.{layer}.", name, count=1)


_NUMBERS = re.compile(
    r"decoder\.layers\.(?P<layer>\d+)\.(?:mlp\.experts\.local_experts\.(?P<expert>\d+)\.)?"
)


def layer_number(name: str) -> int | None:
    """Return the number after ``decoder.layers.``; None if there is none."""
    found = _NUMBERS.match(name)
    return int(found["layer"]) if found else None


def expert_number(name: str) -> int | None:
    """Return the number after ``local_experts.``; None if there is none."""
    found = _NUMBERS.match(name)
    return int(found["expert"]) if found and found["expert"] else None


def renumber(name: str, *, layer: int | None = None, expert: int | None = None) -> str:
    """Replace the layer number or the expert number of a name."""
    if layer is not None:
        name = re.sub(r"(?<=^decoder\.layers\.)\d+", str(layer), name)
    return name if expert is None else re.sub(r"(?<=\.local_experts\.)\d+", str(expert), name)


def to_hugging_face(name: str, rules: tuple[Rule, ...]) -> Rule:
    """Return the rule of a Megatron parameter, with its numbers filled in.

    Raises:
        WeightError: no rule has this name.
    """
    return _filled(_template(name, rules), layer_number(name), expert_number(name))


def is_float32(name: str, rules: tuple[Rule, ...]) -> bool:
    """Return whether a Megatron parameter is float32 in a model of 16 bits."""
    number = layer_number(name)
    template = name.replace(f".layers.{number}.", ".layers.{layer}.", 1)
    return any(rule.is_float32 and rule.megatron == template for rule in rules)


def of_experts(name: str, experts: Iterable[int], rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of a parameter of one expert for each of ``experts``.

    Raises:
        WeightError: no rule has this name.
    """
    template, layer = _template(name, rules), layer_number(name)
    return tuple(_filled(template, layer, expert) for expert in experts)


def _template(name: str, rules: tuple[Rule, ...]) -> Rule:
    layer, expert = layer_number(name), expert_number(name)
    template = name
    if layer is not None:
        template = template.replace(f".layers.{layer}.", ".layers.{layer}.", 1)
    if expert is not None:
        template = template.replace(f".local_experts.{expert}.", ".local_experts.{expert}.", 1)
    for rule in rules:
        if rule.megatron == template:
            return rule
    raise WeightError(
        f"parameter {name!r} of the Megatron model has no Hugging Face name in its family's table"
    )


@lru_cache(maxsize=2**16)  # a rehearsal fills in the same names on every rank
def _filled(rule: Rule, layer: int | None, expert: int | None) -> Rule:
    def fill(name: str) -> str:
        return name.replace("{layer}", str(layer)).replace("{expert}", str(expert))

    hugging_face = tuple(fill(one) for one in rule.hugging_face)
    return replace(rule, megatron=fill(rule.megatron), hugging_face=hugging_face)
