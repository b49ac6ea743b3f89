"""A family of models: the names of its weights and the meaning of its config.json. Pure Python.

All families are decoders with RMSNorm before attention and MLP, rotary embedding, grouped-query
attention and a gated SiLU MLP without biases. A family describes its differences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlpost.models.model_types import HfConfig, MegatronFields
from rlpost.models.names import MTP_LAYER, Rule
from rlpost.models.rope import axis_sections

EncoderLayers = Literal["plain", "gated", "glm"]
"""Layers of Qwen3-VL's, of Qwen2.5-VL's, and of GLM-V's encoder of images."""
DEEP_LAYERS = "deepstack_visual_indexes"
STACKED = ".mlp.experts.gate_up_proj"
"""End of the name of a tensor with a weight of all experts of a layer."""


def _is_stacked(rule: Rule) -> bool:
    return rule.is_stacked


def _no_fields(hf: HfConfig) -> MegatronFields:
    return {}


@dataclass(frozen=True, slots=True)
class Vision:
    """The encoder of images that the trainer runs before a language model.

    Positions have three axes.
    """

    tower: str
    """transformers' class: ``package.module.Class`` in ``transformers.models``."""
    has_deep_features: bool = False
    """Whether hidden states of the encoder are added to those of the first layers of the language
    model (DeepStack, arXiv 2406.04334): one for each of ``deepstack_visual_indexes``.
    """
    prefix: str = "model.visual."
    """Prefix of its weights."""
    interleaved_mrope: bool = True
    """Whether it has interleaved M-RoPE, see ``AxisSections``."""
    layers: EncoderLayers = "plain"
    """The kind of its layers, for ``rlpost.config.plan.vision``."""

    def num_deep_layers(self, hf: HfConfig) -> int:
        """Return how many first layers of the language model add features of images."""
        return len(hf["vision_config"][DEEP_LAYERS]) if self.has_deep_features else 0

    def problem(self, hf: HfConfig) -> str | None:
        """Return what config.json lacks to run the encoder; None if it is complete."""
        sizes = hf.get("vision_config") or {}
        needed = ["out_hidden_size", *([DEEP_LAYERS] if self.has_deep_features else [])]
        missing = [key for key in needed if key not in sizes]
        if missing:
            return f"its vision_config has no {', '.join(missing)}"
        deep = sizes[DEEP_LAYERS] if self.has_deep_features else []
        if len(set(deep)) < len(deep) or not set(deep) <= set(range(sizes.get("depth", 0))):
            return f"{DEEP_LAYERS} = {deep} of its vision_config are not layers of depth = {sizes.get('depth')}"
        if sizes["out_hidden_size"] != hf["hidden_size"]:
            return (
                f"out_hidden_size = {sizes['out_hidden_size']} of its vision_config is not "
                f"hidden_size = {hf['hidden_size']}"
            )
        sections, interleaved = axis_sections(hf), self.interleaved_mrope
        if sections is None or sections.interleaved != interleaved:
            needed_rope = f"mrope_section with mrope_interleaved = {interleaved}".lower()
            return f"its rope_parameters have no {needed_rope}"
        return None


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    rules: tuple[Rule, ...]
    other_rules: tuple[Rule, ...] = ()
    """Those of folders that store experts in the other way: all of a layer in one tensor, or each
    in its own.
    """
    fields: Callable[[HfConfig], MegatronFields] = _no_fields
    """Fields of Megatron's TransformerConfig, from a config.json that is ``resolved``."""
    model_type: str = ""
    """transformers' ``model_type``."""
    page: str = ""
    """Its section in docs/models.md."""
    models: str = ""
    """Published models that have it, for that page."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that config.json may leave out: those of transformers' class, sizes excepted."""
    refused: tuple[str, ...] = ()
    """Keys of config.json that must be absent or false: the features they enable are not supported.
    """
    sandwich_norms: bool = False
    """Whether attention and MLP are also followed by a norm, before the residual is added."""
    projection_norms: bool = False
    """Whether queries, and keys, have one norm over all heads instead of one over each head.

    Such a family leaves ``qk_layernorm`` out of ``fields``: Megatron sums the gradient of those
    norms over the tensor-parallel ranks, but here each rank has only the weight of its heads.
    """
    scales_embedding: bool = False
    """Whether embeddings are multiplied with the square root of the hidden size."""
    tied_by_default: bool = False
    """Whether the output layer is the embedding where config.json lacks ``tie_word_embeddings``."""
    adapters: bool = False
    """Whether adapters are made and tested for its attention and experts (--lora-rank)."""
    engines_lack_windows: bool = False
    """Whether SGLang's model of the family ignores a sliding window in config.json."""
    engines_lack_dense_layers: bool = False
    """Whether SGLang gives experts to every layer.

    It sets ``is_layer_sparse = True`` in ``models/qwen2_moe.py``, ``qwen3_moe.py`` and
    ``qwen3_next.py`` (0.5.21).
    """
    engines_lack_nested_rotary_factor: bool = False
    """Whether SGLang reads ``partial_rotary_factor`` at the top level alone.

    ``configs/qwen3_next.py`` (0.5.21), also the base of ``qwen3_5.py``, has 0.25 where it is only in
    ``rope_parameters``.
    """
    engines_lack_fp8_scales: bool = False
    """Whether SGLang loads FP8 blocks without their scales.

    ``models/llama.py`` (0.5.21) renames ``weight_scale_inv`` to ``weight_scale``, which no module has.
    """
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of a language model's weights: alone, and in a folder with an encoder of images."""
    carried: tuple[str, ...] = ()
    """Prefixes of weights that are exported unchanged: those of the encoder of images."""
    vision: Vision | None = None
    """The encoder of images, if the trainer runs it; a family without one is trained as text."""
    writes_channels: bool = False
    """Whether answers are messages of Harmony, in channels that special tokens mark."""
    carries_extra_layers: bool = False
    """Whether the folder may contain layers after ``num_hidden_layers`` (multi-token prediction).

    Without ``trains_extra_layer``, or without ``--enable-mtp-training``, they are exported unchanged.
    """

    @property
    def trains_extra_layer(self) -> bool:
        """Whether ``--enable-mtp-training`` can train the layer for multi-token prediction."""
        return set(MTP_LAYER) <= set(self.rules)

    def stored_in(self, tensors: Collection[str]) -> Family:
        """Return the family with the rules for a folder with these tensors."""
        stacks = any(name.endswith(STACKED) for name in tensors)
        if not self.other_rules or not tensors or stacks == any(map(_is_stacked, self.rules)):
            return self
        return replace(self, rules=self.other_rules, other_rules=self.rules)

    def resolved(self, hf: HfConfig) -> dict[str, Any]:
        """Return config.json with the values of keys that it leaves out or sets to null.

        A null for ``head_dim`` or ``num_key_value_heads`` means another size, and false for what is
        true by default.
        """
        given = {key: hf[key] for key in hf if hf[key] is not None or key == "head_dim"}
        found = {**hf, **self.defaults, **given}
        nulls = {key for key in hf if hf[key] is None}
        found |= {key: False for key in nulls if self.defaults.get(key) is True}
        if "num_key_value_heads" in hf and hf["num_key_value_heads"] is None:
            found["num_key_value_heads"] = hf["num_attention_heads"]
        return found

    def is_tied(self, hf: HfConfig) -> bool:
        """Return whether the output layer is the embedding."""
        tied = hf.get("tie_word_embeddings")
        return self.tied_by_default if tied is None else bool(tied)


def window_fields(hf: HfConfig, layer_types: Sequence[str]) -> dict[str, object]:
    """TransformerConfig fields of the layers with a sliding window; empty if no layer has one.

    In Megatron's window the first number does not count the query itself.
    """
    windowed = [int(kind == "sliding_attention") for kind in layer_types]
    if not any(windowed):
        return {}
    return {"window_size": (hf["sliding_window"] - 1, 0), "window_attn_skip_freq": windowed}


def expert_fields(
    hf: HfConfig,
    *,
    num_experts: int,
    layer_is_sparse: list[bool],
    ffn: str = "moe_intermediate_size",
) -> dict[str, object]:
    """TransformerConfig fields of a mixture of experts without auxiliary losses; ``ffn`` is the key
    of an expert's intermediate size.
    """
    return {
        "num_moe_experts": num_experts,
        "moe_layer_freq": [int(sparse) for sparse in layer_is_sparse],
        "moe_ffn_hidden_size": hf[ffn],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
