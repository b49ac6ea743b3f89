"""Read config.json of a Hugging Face folder: the keys of its language model, in one table.

Models with images are published with the keys of their language model nested in ``text_config``,
and a few of the whole model beside it. Everything in this project that reads the keys of a model
reads them through ``read_config``; an export carries the file itself. Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlpost.models.families import family_of
from rlpost.models.model_types import HfConfig

NESTED, TIED = "text_config", "tie_word_embeddings"
OF_THE_WHOLE = (
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    TIED,
    "torch_dtype",
    "vision_config",
)
"""Keys that describe the whole folder; those beside ``text_config`` are valid."""


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``. Raises ValueError if it is anything else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("not valid JSON: it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object; give a config.json")
    return value


def read_config(folder: str | Path) -> HfConfig:
    """Return the keys of the language model in ``folder``.

    Raises:
        OSError: there is no config.json.
        ValueError: it is not a JSON object.
    """
    return language_model(parse_object((Path(folder) / "config.json").read_text()))


def language_model(config: HfConfig) -> HfConfig:
    """Return the keys of the language model of a parsed config.json; unchanged if none is nested.

    Nested ones may leave out sizes (Gemma-3): those of the family are added.
    """
    text = config.get(NESTED) if isinstance(config, Mapping) else None
    if not isinstance(text, Mapping):
        return config
    whole = {key: config[key] for key in OF_THE_WHOLE if config.get(key) is not None}
    keys = {**text, **whole}
    known = family_of(keys)
    return keys if known is None else known.resolved(keys)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SIZES = _words(
    "hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim vocab_size max_position_embeddings num_experts num_local_experts "
    "n_routed_experts num_experts_per_tok n_group topk_group kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim rotary_dim full_attention_interval linear_num_key_heads "
    "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
)
COUNTS = _words(
    "q_lora_rank first_k_dense_replace n_shared_experts num_nextn_predict_layers max_window_layers "
    "sliding_window shared_expert_intermediate_size"
)
NUMBERS = _words(
    "rms_norm_eps rope_theta rope_local_base_freq partial_rotary_factor factor low_freq_factor "
    "high_freq_factor beta_fast beta_slow routed_scaling_factor query_pre_attn_scalar swiglu_limit"
)
FLAGS = _words(
    "tie_word_embeddings attention_bias qkv_bias mlp_bias norm_topk_prob use_sliding_window use_qk_norm "
    "rope_interleave mrope_interleaved truncate"
)
"""Keys by the kind of their values; 0 is a count, and no size. Each may be null."""


def value_problem(hf: HfConfig) -> str | None:
    """Return which value cannot be one of its key; None if all can.

    A text, such as "false", would be taken for another value, and NaN for a number.
    """
    ropes = [hf.get("rope_parameters"), hf.get("rope_scaling")]
    ropes += [each for one in ropes if isinstance(one, Mapping) for each in one.values()]
    for keys in (hf, *(one for one in ropes if isinstance(one, Mapping))):
        for key, value in keys.items():
            if value is not None and (needed := _needed(key, value)):
                return f"{key} = {json.dumps(value)}; it must be {needed}"
    for key, value in zip(("rope_parameters", "rope_scaling"), ropes, strict=False):
        if value is not None and not isinstance(value, Mapping):
            return f"{key} = {json.dumps(value)}; it must be an object or null"
    return None


def _needed(key: str, value: object) -> str:
    """What the value of a key must be; empty if it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in SIZES | COUNTS:
        least = int(key in SIZES)
        is_right = is_number and isinstance(value, int) and value >= least
        return "" if is_right else f"an integer of at least {least}"
    if key in NUMBERS:
        is_right = is_number and 0 < value < math.inf  # type: ignore[operator]
        return "" if is_right else "a number above 0"
    return "true or false" if key in FLAGS and not isinstance(value, bool) else ""


def tied_problem(config: HfConfig) -> str | None:
    """Return why it is not known whether the output layer is the embedding; None if it is.

    transformers (5.12) reads the key of the whole, as false if it is missing. So does SGLang (0.5.21)
    for the models whose encoder the trainer has: transformers writes another value into the language
    model of Qwen3-VL with experts. For the others SGLang reads that of the language model.
    """
    text = config.get(NESTED) or {}
    whole, nested = config.get(TIED), text.get(TIED)
    known = family_of(language_model(config))
    if known is not None and known.vision is not None:
        is_known = whole is not None or not nested
    else:
        is_known = None in (whole, nested) or whole == nested
    if is_known:
        return None
    return (
        f"{TIED} is {whole} in config.json and {nested} in its {NESTED}; give both the value of the "
        "weights: true where they have no lm_head.weight"
    )


def with_language_model(config: HfConfig, change: Callable[[HfConfig], HfConfig]) -> HfConfig:
    """Return a parsed config.json with its language model's keys changed, where they stand."""
    if isinstance(config.get(NESTED), Mapping):
        return {**config, NESTED: change(config[NESTED])}
    return change(config)
