"""Read the options of the rotary embedding from config.json. Standard library only.

Input: config.json as transformers 4 or 5 writes it. Output: the options of one kind of layer, the
factor on cosine and sine, and the reason why the options are not supported.
``rlpost.actor.rotary`` computes the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlpost.weights.family import HfConfig

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
WITH_CONTEXT = ("llama3", "yarn")
"""Types that depend on the context before the scaling, ``original_max_position_embeddings``."""


def rope(hf: HfConfig) -> Mapping[str, Any]:
    """Return the options of layers without a window: nested in transformers 5, top-level keys in 4.

    The context before the scaling is that of transformers: the top-level key, the option, or
    ``max_position_embeddings`` (``standardize_rope_params`` in ``modeling_rope_utils.py``).
    """
    flat = dict(hf) | (hf.get("rope_scaling") or {})
    given: Mapping[str, Any] = hf.get("rope_parameters") or flat
    found: Mapping[str, Any] = given.get(FULL, given)
    key = "original_max_position_embeddings"
    context = hf.get(key) or found.get(key) or hf.get("max_position_embeddings")
    return {**found, key: context} if rope_type(found) in WITH_CONTEXT else found


def local_rope(hf: HfConfig) -> Mapping[str, Any] | None:
    """Return the options of layers with a window where they differ from ``rope``; None if not."""
    nested = (hf.get("rope_parameters") or {}).get(SLIDING)
    if nested is not None:
        return dict(nested)
    return {"rope_theta": hf[LOCAL_BASE]} if LOCAL_BASE in hf else None


def rope_type(options: Mapping[str, Any]) -> str:
    """Return the type of the rotary embedding; older configurations call the key "type"."""
    return options.get("rope_type") or options.get("type") or "default"


def attention_factor(options: Mapping[str, Any]) -> float:
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

    Args:
        hf: config.json.
        latent: the supported type in latent attention, which Megatron computes; None without.
    """
    options, local = rope(hf), local_rope(hf)
    kind = rope_type(options)
    if latent is not None:
        return {} if kind in ("default", latent) else {"rope_type": kind}
    if kind not in OPTIONS:
        return {"rope_type": kind}
    # Megatron has one factor for all layers, and SGLang's YaRN ignores ``attention_factor``.
    if kind == "yarn" and options.get("attention_factor"):
        return {"attention_factor": options["attention_factor"]}
    if local is not None and (kind == "yarn" or rope_type(local) != "default"):
        return {"rope_type": kind if kind == "yarn" else rope_type(local)}
    return {}


def missing_options(hf: HfConfig) -> list[str]:
    """Return the required options that config.json lacks or leaves empty."""
    options = rope(hf)
    return [key for key in OPTIONS.get(rope_type(options), ()) if not options.get(key)]
