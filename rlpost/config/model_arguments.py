"""MODEL_ARGS: the architecture as command lines for Megatron give it, compared with config.json. Pure.

config.json alone decides. A command line written for Megatron states the architecture again
(``--num-layers 36``); a value that contradicts config.json shows that the line is of another model.

Input: the given values, as text or as TOML has them, and what config.json says by the same names
(``rlpost.config.plan.architecture``). Output: one line for each contradiction. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rlpost.config.wording import value_text
from rlpost.errors import suggestion


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SWITCHES = _names(
    "group_query_attention use_rotary_position_embeddings rotary_interleaved "
    "untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias qk_layernorm "
    "post_self_attn_layernorm post_mlp_layernorm multi_latent_attention swiglu quick_geglu geglu "
    "attention_output_gate apply_layernorm_1p moe_shared_expert_gate moe_router_pre_softmax "
    "moe_router_enable_expert_bias"
)
"""Arguments that are true or false; without a value they are true."""
PATTERNS = _names("window_attn_skip_freq linear_attention_freq moe_layer_freq")
"""Arguments with 0 or 1 for each layer, such as ``[0]*3+[1]*89``."""
VALUES = _names(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "normalization norm_epsilon position_embedding_type rotary_base local_rotary_base rotary_percent "
    "vocab_size qk_norm_type q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
    "rope_type rotary_scaling_factor original_max_position_embeddings mscale mscale_all_dim "
    "softmax_scale softmax_type sliding_window linear_conv_kernel_dim linear_key_head_dim "
    "linear_value_head_dim linear_num_key_heads linear_num_value_heads num_experts "
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk "
    "moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups "
    "moe_router_group_topk mtp_num_layers"
)
"""Arguments with one number or word."""
ONLY_ZERO = frozenset(
    {"attention_dropout", "hidden_dropout", "moe_aux_loss_coeff", "moe_router_bias_update_rate"}
)
"""Arguments that have one valid value: the trainer has no dropout, and the router stays as loaded."""
WITHOUT_EFFECT = frozenset({"moe_router_load_balancing_type"})
"""The kind of a loss whose coefficient is 0."""
NAMES = SWITCHES | PATTERNS | VALUES | ONLY_ZERO | WITHOUT_EFFECT

OVERRIDABLE = {
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}
"""Values that ``--override-hf-config`` may change, with their key in config.json.

They do not change the shape of a weight.
"""
_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True} | {
    "false": False, "0": False, "no": False, "off": False
}  # fmt: skip


def known_arguments(given: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments that are set. Raises ValueError for one that is unknown."""
    for name in given:
        if name not in NAMES:
            raise ValueError(f"{name} is no argument of a model{suggestion(name, sorted(NAMES))}")
    kept = {name: _one(value) for name, value in given.items()}
    return {name: value for name, value in kept.items() if value not in (None, "none")}


def known_overrides(given: Mapping[str, float]) -> dict[str, float]:
    """Return the overrides. Raises ValueError for one that the weights do not allow."""
    for name, value in given.items():
        if name not in OVERRIDABLE:
            raise ValueError(
                f"{name} cannot be overridden, the weights are made for it; only "
                f"{', '.join(OVERRIDABLE)} can"
            )
        if value <= 0 or (name == "rotary_percent" and value > 1):
            raise ValueError(f"{name}={value:g} must be positive, and rotary_percent at most 1")
        if name == "moe_router_topk" and value != int(value):
            raise ValueError(f"{name}={value:g} must be a whole number")
    return {name: int(one) if name == "moe_router_topk" else one for name, one in given.items()}


def problems(arguments: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """Return one line per given value that contradicts config.json.

    Args:
        arguments: given values by name.
        expected: what config.json says by argument; None or no entry for an absent feature.
    """
    lines = []
    for name, value in arguments.items():
        if name in WITHOUT_EFFECT:
            continue
        spelled = f"--{name.replace('_', '-')} {value_text(value)}"
        if name in ONLY_ZERO:
            if not _agrees(value, 0.0):
                lines.append(f"{spelled}: only 0 is supported; use 0, or leave it out")
        elif name in PATTERNS and layer_pattern(value) is None:
            lines.append(
                f"{spelled}: must be a sum of lists of 0 and 1; write one such as [0]*3+[1]*89"
            )
        elif not _agrees(value, expected.get(name)):
            lines.append(_difference(name, spelled, value, expected.get(name)))
    return lines


def idle_overrides(overrides: Mapping[str, float], expected: Mapping[str, object]) -> list[str]:
    """Return one line per override of a value that the model does not have; see ``problems``."""
    return [
        f"--override-hf-config {name}={value:g}: the model has no such value; leave it out"
        for name, value in overrides.items()
        if expected.get(name) is None
    ]


def layer_pattern(pattern: object) -> tuple[int, ...] | None:
    """Expand ``[0]*3+[1]*89`` (Megatron's syntax) to 3 zeros and 89 ones; None if it is none.

    >>> layer_pattern("[0]*1+[1]*2")
    (0, 1, 1)
    """
    if isinstance(pattern, (list, tuple)):
        return tuple(pattern) if pattern and set(pattern) <= {0, 1} else None
    if not isinstance(pattern, str):
        return None
    terms = pattern.replace(" ", "").removeprefix("(").removesuffix(")").split("+")
    matches = [_TERM.fullmatch(term) for term in terms]
    if not all(matches):
        return None
    return tuple(
        int(digit) for term in matches if term for digit in term[1].split(",") * int(term[2] or 1)
    )


def _one(value: Any) -> Any:
    """Return the word of a flag that was given as a list of one."""
    is_word = isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str)
    return value[0] if is_word else value


def _agrees(given: object, expected: object) -> bool:
    """Return whether a value, perhaps as text, is what config.json says."""
    if isinstance(expected, tuple):
        return layer_pattern(given) == expected
    if expected is None or isinstance(expected, bool):
        return _BOOLEANS.get(str(given).lower()) is bool(expected)
    if isinstance(expected, str):
        return given == expected
    try:
        return math.isclose(float(str(given)), float(str(expected)), rel_tol=1e-9)
    except ValueError:
        return False


def _difference(name: str, spelled: str, value: object, expected: object) -> str:
    """Return the line for a value that differs."""
    flag = "--" + name.replace("_", "-")
    if expected is None:
        statement, correct = "has no such setting", f"{flag} none"
    else:
        statement, correct = f"says {value_text(expected)}", f"{flag} {value_text(expected)}"
    remedy = f"use {correct}"
    if name in OVERRIDABLE:
        remedy += f", or keep the value with --override-hf-config {name}={value}"
    return f"{spelled}, but the model's config.json {statement}; {remedy}"
