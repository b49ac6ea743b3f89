"""Read the options of the rotary embedding from config.json. Standard library only.

Input: config.json as transformers 4 or 5 writes it. Output: the options of one kind of layer, the
factor on cosine and sine, and the reason why the options are not supported.
``rlpost.trainer.rotary`` computes the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypedDict

from rlpost.errors import WeightError
from rlpost.models.model_types import HfConfig

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in ``layer_types``, and in ``rope_parameters`` where they have other options."""
LOCAL_BASE = "rope_local_base_freq"
"""Base of the layers with a window in the format of transformers 4 (Gemma-3)."""
OPTIONS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Supported values of ``rope_type``, each with the options that it requires.

``dynamic`` and ``longrope`` are missing because their frequencies depend on the length of the
sequence: the same token would have another embedding in the engine, while its sequence is short.
"""
TOP_LEVEL = ("rope_theta", "partial_rotary_factor")
"""Options that may be at the top level of config.json."""
IGNORED = ("max_position_embeddings", "mrope_interleaved", "mrope_section")
"""Options beside those of ``RopeOptions`` that change nothing for text.

Sections are of positions in images (``axis_sections``); those of a text are equal in all three.
"""
WITH_CONTEXT = ("llama3", "yarn")
"""Types that depend on the context before the scaling, ``original_max_position_embeddings``."""


class RopeOptions(TypedDict, total=False):
    """Options of a rotary embedding in config.json, with transformers' names."""

    rope_type: str
    type: str
    rope_theta: float
    partial_rotary_factor: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    mscale: float
    mscale_all_dim: float
    attention_factor: float


def rope(hf: HfConfig) -> RopeOptions:
    """Return the options of layers without a window: nested in transformers 5, top-level keys in 4.

    As in transformers, ``rope_scaling`` replaces ``rope_parameters``, and options that are not there
    are those of the top level (``convert_rope_params_to_dict`` in ``modeling_rope_utils.py``). The
    context before the scaling is that of transformers: the top-level key, the option, or
    ``max_position_embeddings`` (``standardize_rope_params`` in ``modeling_rope_utils.py``).

    Raises:
        WeightError: the type needs that context, and config.json has none of the three.
    """
    nested, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    top = {key: hf[key] for key in TOP_LEVEL if hf.get(key) is not None}
    nested_options = scaling or nested
    if FULL in nested:  # those of Gemma-3 are updated by rope_scaling
        nested_options = {**nested[FULL], **scaling}
    options = _options({**top, **nested_options})
    if rope_type(options) not in WITH_CONTEXT:
        return options
    key = "original_max_position_embeddings"
    option = options.get("original_max_position_embeddings")
    context = hf.get(key) or option or hf.get("max_position_embeddings")
    if context is None:
        raise WeightError(
            f"has no max_position_embeddings, which rope_type = {rope_type(options)!r} needs without "
            f"{key}; add what the model's page says"
        )
    return {**options, "original_max_position_embeddings": context}


def _options(given: HfConfig) -> RopeOptions:
    """Return what ``given`` has of the options, unchecked."""
    return {name: given[name] for name in RopeOptions.__annotations__ if name in given}  # type: ignore[return-value]


def local_rope(hf: HfConfig) -> RopeOptions | None:
    """Return the options of layers with a window where they differ from ``rope``; None if not."""
    nested: RopeOptions | None = (hf.get("rope_parameters") or {}).get(SLIDING)
    if nested is not None:
        return nested
    return {"rope_theta": hf[LOCAL_BASE]} if LOCAL_BASE in hf else None


class AxisSections(NamedTuple):
    """Which frequencies of a head rotate by the frame, the row and the column of an image."""

    sizes: tuple[int, ...]
    """How many rotate by each of the three."""
    interleaved: bool
    """Whether M-RoPE is interleaved: frame, row, column, frame, ... (Qwen3-VL); those after the last
    column rotate by the frame. Otherwise each axis has one section after the other (Qwen2.5-VL, GLM-V).
    """

    def of_axis(self, axis: int, count: int) -> range:
        """Return the frequencies, of ``count``, that rotate by the row (axis 1) or column (2)."""
        if self.interleaved:
            return range(axis, min(3 * self.sizes[axis], count), 3)
        first = sum(self.sizes[:axis])
        return range(first, min(first + self.sizes[axis], count))


def axis_sections(hf: HfConfig) -> AxisSections | None:
    """Return the sections of a model with images; None where config.json has none."""
    options = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    sections = options.get("mrope_section")
    return (
        AxisSections(tuple(sections), bool(options.get("mrope_interleaved"))) if sections else None
    )


def rope_type(options: RopeOptions) -> str:
    """Return the type of the rotary embedding; older configurations call the key "type".

    ``mrope`` has positions of images, and for text the frequencies of ``default``.
    """
    kind = options.get("rope_type") or options.get("type") or "default"
    return "default" if kind == "mrope" else kind


def attention_factor(options: RopeOptions) -> float:
    """Return the factor on cosine and sine: 1 except with YaRN.

    0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22); with ``mscale`` and ``mscale_all_dim`` the
    ratio of those terms, each with its weight on the logarithm, as in transformers.
    """
    if rope_type(options) != "yarn":
        return 1.0
    logarithm = 0.1 * math.log(max(options["factor"], 1.0))
    mscale, all_dim = options.get("mscale"), options.get("mscale_all_dim")
    if mscale and all_dim:
        return (mscale * logarithm + 1.0) / (all_dim * logarithm + 1.0)
    return logarithm + 1.0


def refused_options(hf: HfConfig, *, latent: str | None) -> dict[str, object]:
    """Return the options that are not supported, by their key; empty if all are.

    ``latent`` is the type that Megatron computes in latent attention; None in other attention.
    """
    if unknown := _unknown_options(hf):
        return unknown
    options, local = rope(hf), local_rope(hf)
    kind = rope_type(options)
    if latent is not None:
        return {} if kind in ("default", latent) else {"rope_type": kind}
    if kind not in OPTIONS:
        return {"rope_type": kind}
    # For such types transformers applies the top level's over the nested one when it builds the model
    # (``standardize_rope_params``), so that it computes something else than the file says.
    nested, top = options.get("partial_rotary_factor"), hf.get("partial_rotary_factor")
    if kind != "default" and top is not None and nested != top:
        return {"partial_rotary_factor": nested}
    # Megatron has one factor for all layers, and SGLang's YaRN ignores ``attention_factor``.
    if kind == "yarn" and options.get("attention_factor"):
        return {"attention_factor": options["attention_factor"]}
    if local is not None and (kind == "yarn" or rope_type(local) != "default"):
        return {"rope_type": kind if kind == "yarn" else rope_type(local)}
    return {}


def _unknown_options(hf: HfConfig) -> dict[str, object]:
    """Return the options with a value that are neither read nor known to change nothing."""
    nested, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    groups = [nested[FULL], nested.get(SLIDING) or {}] if FULL in nested else [nested]
    known = {*RopeOptions.__annotations__, *IGNORED}
    return {
        key: value
        for group in (scaling, *groups)
        for key, value in group.items()
        if key not in known and value
    }


def missing_options(hf: HfConfig) -> list[str]:
    """Return the required options that config.json lacks or leaves empty."""
    options = rope(hf)
    given: Mapping[str, object] = options
    return [key for key in OPTIONS.get(rope_type(options), ()) if not given.get(key)]
