"""Compare what the trainer and the engines make of one model folder, value by value. Pure.

Input: a model's config.json as the trainer reads it (``ModelDescription``), and the configuration
object of transformers, from which SGLang builds its model. Output: a ``ResolvedModel`` of each side;
one line for each value that differs. A difference means log-probs of two different models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlpost.config.plan.architecture import rotary_percent
from rlpost.config.wording import value_text
from rlpost.models.rope import FULL, SLIDING, attention_factor, rope_type
from rlpost.trainer.model_description import ModelDescription

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""YaRN's defaults (arXiv 2309.00071, section 3.2), on both sides."""
SCALARS = (
    "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "num_experts_per_tok", "routed_scaling_factor",
)  # fmt: skip
"""Fields with the name of their key in config.json."""
ANY_LENGTH = 2048
"""SGLang's context without ``max_position_embeddings``."""

Options = tuple[tuple[str, object], ...]
"""Sorted options of a rotary embedding; those that its type ignores are left out."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The values of one side; None where it has no such value."""

    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    num_experts_per_tok: int | None
    routed_scaling_factor: float | None
    rope: Options
    local_rope: Options | None
    """The options in layers with a window, where they have others."""
    sliding_window: tuple[int | None, ...]
    """The window of each layer in tokens; None for full attention."""
    context_length: int | None
    """Tokens of a request and its answer."""
    eos_token_id: tuple[int, ...]


def trainer_model(
    description: ModelDescription, *, context: int | None, end_tokens: tuple[int, ...]
) -> ResolvedModel:
    """Return the trainer's values; ``context`` and ``end_tokens`` are those that the run assumes."""
    hf, megatron = description.hf_config, description.fields
    window = megatron.get("window_size")
    windowed = megatron.get("window_attn_skip_freq", [0] * hf["num_hidden_layers"])
    scalars = {key: hf.get(key) for key in SCALARS}
    if "moe_router_topk" not in megatron:
        scalars["num_experts_per_tok"] = scalars["routed_scaling_factor"] = None
    rotated = 1.0 if "kv_lora_rank" in hf else rotary_percent(hf)
    local = description.local_rope
    return ResolvedModel(
        **scalars,  # type: ignore[arg-type]
        head_dim=description.head_dim,
        tie_word_embeddings=description.tied,
        rope=_rope(description.rope, rotated),
        local_rope=None if local is None else _rope(local, 1.0),
        sliding_window=tuple(window[0] + 1 if has and window else None for has in windowed),
        context_length=context,
        eos_token_id=end_tokens,
    )


def engine_model(
    resolved: object, *, generation_eos: int | list[int] | None, context: int | None
) -> ResolvedModel:
    """Return the engines' values.

    Args:
        resolved: transformers' configuration of the text model, with
            ``--sglang-json-model-override-args`` applied.
        generation_eos: ``eos_token_id`` of generation_config.json.
        context: ``--sglang-context-length``; None for the model's.
    """
    theta = getattr(resolved, "rope_theta", None) or 10000.0
    # ``get_rope_config`` in SGLang (utils/hf_transformers/common.py, 0.5.21)
    options = dict(getattr(resolved, "rope_parameters", None) or {})
    nested = options.get(FULL)
    local = options.get(SLIDING) if nested is not None else None
    latent = getattr(resolved, "kv_lora_rank", None) is not None
    width = _head_dim(resolved, latent=latent)
    ends = [getattr(resolved, "eos_token_id", None), generation_eos]
    return ResolvedModel(
        **{key: getattr(resolved, key, None) for key in SCALARS},  # type: ignore[arg-type]
        head_dim=width,
        tie_word_embeddings=bool(getattr(resolved, "tie_word_embeddings", False)),
        rope=_rope({"rope_theta": theta, **(nested or options)}, _rotated(resolved, width, latent)),
        local_rope=None if local is None else _rope(local, 1.0),
        sliding_window=_windows(resolved),
        context_length=context or model_context(resolved),
        eos_token_id=tuple(sorted(set().union(*map(_as_ids, ends)))),
    )


def model_context(resolved: object) -> int:
    """Return the engines' longest context (``get_context_length`` there, 0.5.21)."""
    scaling = getattr(resolved, "rope_scaling", None) or {}
    is_included = "original_max_position_embeddings" in scaling
    is_included |= scaling.get("rope_type") == "llama3"
    factor = 1 if is_included else scaling.get("factor", 1)
    return int(factor * (getattr(resolved, "max_position_embeddings", None) or ANY_LENGTH))


def differences(trainer: ResolvedModel, engines: ResolvedModel) -> list[str]:
    """Return one line for each value that the trainer has and the engines have differently."""
    ours, theirs = dict(_flat(trainer)), dict(_flat(engines))
    return [
        f"{name}: the trainer has {_text(ours.get(name))}, the engines {_text(theirs.get(name))}"
        for name in dict.fromkeys([*ours, *theirs])
        if (name in ours or name.startswith("rope")) and ours.get(name) != theirs.get(name)
    ]


def _flat(model: ResolvedModel) -> Iterator[tuple[str, object]]:
    """Yield the values, with an option of the rotary embedding as ``rope.KEY``; none that is None."""
    for field in fields(model):
        value = getattr(model, field.name)
        if field.name in ("rope", "local_rope"):
            yield from ((f"{field.name}.{key}", option) for key, option in value or ())
        elif value is not None:
            yield field.name, value


def _text(value: object) -> str:
    if isinstance(value, tuple) and len(set(value)) == 1 and len(value) > 1:
        return f"{_text(value[0])} in each layer"
    if isinstance(value, tuple):
        return " ".join(map(_text, value))
    return "none" if value is None else value_text(value)


def _rope(options: Mapping[str, Any], rotated: float) -> Options:
    """Return the options that the type reads, with the defaults of those left out."""
    kind = rope_type(options)  # type: ignore[arg-type]
    rope_values: dict[str, object] = {
        "rope_type": kind,
        "rope_theta": float(options.get("rope_theta") or 10000.0),
        "partial_rotary_factor": float(rotated),
    }
    context = options.get("original_max_position_embeddings")
    if kind != "default":
        rope_values["factor"] = float(options.get("factor") or 1.0)
    if kind in ("llama3", "yarn"):
        rope_values["original_max_position_embeddings"] = context
    if kind == "llama3":
        rope_values |= {key: options.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        rope_values |= {
            "beta_fast": float(options.get("beta_fast") or BETA_FAST),
            "beta_slow": float(options.get("beta_slow") or BETA_SLOW),
            "truncate": bool(options.get("truncate", True)),
            "attention_factor": options.get("attention_factor")
            or attention_factor(options | {"factor": rope_values["factor"]}),  # type: ignore[operator]
        }
    return tuple(sorted(rope_values.items()))


def _rotated(resolved: object, width: int, latent: bool) -> float:
    """Return the fraction of a head that SGLang rotates; MiniMax-M2 has ``rotary_dim``."""
    if latent:
        return 1.0
    if (rotary := getattr(resolved, "rotary_dim", None)) is not None:
        return float(rotary / width)
    options = getattr(resolved, "rope_parameters", None) or {}
    options = options.get(FULL, options)
    own = getattr(resolved, "partial_rotary_factor", None)
    return float(options.get("partial_rotary_factor") or own or 1.0)


def _head_dim(resolved: Any, *, latent: bool) -> int:
    if latent:
        return int(resolved.qk_nope_head_dim)
    given = getattr(resolved, "head_dim", None)
    return int(given or resolved.hidden_size // resolved.num_attention_heads)


def _windows(resolved: Any) -> tuple[int | None, ...]:
    window = getattr(resolved, "sliding_window", None)
    kinds = getattr(resolved, "layer_types", None)
    # ``Qwen3MoeModel`` gives every layer the window, and its configuration has no kinds of layers
    if kinds is None or resolved.model_type == "qwen3_moe":
        return (window,) * resolved.num_hidden_layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _as_ids(value: int | list[int] | None) -> set[int]:
    return {value} if isinstance(value, int) else set(value or ())
