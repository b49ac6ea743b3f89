"""Build ``config.json`` from the arguments of [model].

The inverse of ``rlpost.config.plan.architecture``.

Input: the architecture as in the MODEL_ARGS of Megatron recipes. Output: a Hugging Face
configuration of the family that has all these features. Standard library only. Invariant:
``architecture`` of the output equals the input; otherwise an error names the features that no known
family has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.config.plan.architecture import problems
from rlpost.errors import ConfigError
from rlpost.models.families import FAMILIES
from rlpost.models.family import window_keys
from rlpost.models.model_types import ModelArguments


def hf_config(arguments: ModelArguments) -> dict[str, Any]:
    """Return the configuration for the ``arguments`` of [model].

    Raises:
        ConfigError: no known family has this architecture; one line per argument that differs.
    """
    name = architecture_of(arguments)
    family = FAMILIES[name]
    heads = arguments["num_attention_heads"]
    common: dict[str, Any] = {
        "architectures": [name],
        "model_type": family.model_type,
        "num_hidden_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "intermediate_size": arguments["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": arguments.get("num_query_groups") or heads,
        "head_dim": arguments.get("kv_channels") or arguments["hidden_size"] // heads,
        "vocab_size": arguments["vocab_size"],
        "rms_norm_eps": arguments.get("norm_epsilon") or 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": arguments.get("rotary_base") or 10000.0,
        },
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
        "hidden_act": "silu",
    }
    if (share := arguments.get("rotary_percent") or 1.0) != 1.0:
        common["rope_parameters"]["partial_rotary_factor"] = share
        common["partial_rotary_factor"] = share
    if arguments.get("sliding_window"):
        common |= window_keys(arguments, (1,) * arguments["num_layers"])
    if family.trains_extra_layer and arguments.get("mtp_num_layers"):
        common["num_nextn_predict_layers"] = arguments["mtp_num_layers"]
    hf = dict(family.hf_config(arguments, common))
    model_values = {
        key: value
        for key, value in arguments.items()
        if value is not None and key != "override_hf_config"
    }
    if wrong := problems(model_values, family, hf):
        first = f"[model] describes no model of a known family; the nearest is {name}:"
        raise ConfigError("\n".join([first, *wrong]))
    return hf


def architecture_of(arguments: Mapping[str, object]) -> str:
    """Return the name of the architecture that the arguments describe."""
    return next(name for name in reversed(FAMILIES) if FAMILIES[name].describes(arguments))
