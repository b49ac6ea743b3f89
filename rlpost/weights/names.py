"""Names of weights: Megatron's on one side, Hugging Face's on the other. Pure Python, one table a family.

In: the name of a Megatron parameter. Out: the Hugging Face names it holds and how they lie in it. ``{layer}`` stands
for the number of the layer, which is the same on both sides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlpost.errors import WeightError

Layout = Literal["plain", "vocabulary", "qkv", "gated"]
"""plain: as it is. vocabulary: rows are tokens, padded at the end. qkv: query, key and value by group. gated: gate
above up, in each tensor-parallel shard."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What the layouts of tensors need to know of a model."""

    num_query_groups: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table."""

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout = "plain"


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."

QWEN3: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
    Rule(_LAYER + "input_layernorm.weight", (_HF_LAYER + "input_layernorm.weight",)),
    Rule(
        _LAYER + "self_attention.linear_qkv.weight",
        tuple(f"{_HF_LAYER}self_attn.{part}_proj.weight" for part in "qkv"),
        "qkv",
    ),
    Rule(_LAYER + "self_attention.q_layernorm.weight", (_HF_LAYER + "self_attn.q_norm.weight",)),
    Rule(_LAYER + "self_attention.k_layernorm.weight", (_HF_LAYER + "self_attn.k_norm.weight",)),
    Rule(_LAYER + "self_attention.linear_proj.weight", (_HF_LAYER + "self_attn.o_proj.weight",)),
    Rule(_LAYER + "pre_mlp_layernorm.weight", (_HF_LAYER + "post_attention_layernorm.weight",)),
    Rule(
        _LAYER + "mlp.linear_fc1.weight",
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"),
        "gated",
    ),
    Rule(_LAYER + "mlp.linear_fc2.weight", (_HF_LAYER + "mlp.down_proj.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocabulary"),
)

FAMILIES: dict[str, tuple[Rule, ...]] = {"Qwen3ForCausalLM": QWEN3}
"""By the first entry of ``architectures`` in config.json."""


def family(architecture: str) -> tuple[Rule, ...]:
    """The table of an architecture; raises WeightError, naming those known."""
    if architecture not in FAMILIES:
        raise WeightError(f"architecture {architecture!r} has no table of weight names; known: {sorted(FAMILIES)}")
    return FAMILIES[architecture]


def to_hugging_face(name: str, rules: tuple[Rule, ...]) -> Rule:
    """The rule of a Megatron parameter with the layer filled in; raises WeightError for a name of no rule."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    number = layer[1] if layer else ""
    template = name.replace(f".layers.{number}.", ".layers.{layer}.", 1) if layer else name
    for rule in rules:
        if rule.megatron == template:
            return Rule(name, tuple(hf.replace("{layer}", number) for hf in rule.hugging_face), rule.layout)
    raise WeightError(f"parameter {name!r} of the Megatron model has no Hugging Face name in its family's table")
