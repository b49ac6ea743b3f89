"""``config.json`` of a model that is described in the words of [model]: the way back of ``rlpost.actor.architecture``.

In: the architecture as MODEL_ARGS of Megatron recipes give it. Out: the keys of a Hugging Face configuration, by the
family that has all that the words ask for. Standard library only. Invariant: ``architecture`` of what comes out says
what came in, or there is an error that names what no known family has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.actor.architecture import problems
from rlpost.errors import ConfigError
from rlpost.weights.families import family

MODEL_TYPES = {
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""What transformers calls the configuration of an architecture."""


def hf_config(words: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration. Raises ConfigError with a line for each word that it would contradict."""
    name = architecture_of(words)
    heads = words["num_attention_heads"]
    hf = {
        "architectures": [name],
        "model_type": MODEL_TYPES[name],
        "num_hidden_layers": words["num_layers"],
        "hidden_size": words["hidden_size"],
        "intermediate_size": words["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": words.get("num_query_groups") or heads,
        "head_dim": words.get("kv_channels") or words["hidden_size"] // heads,
        "vocab_size": words["vocab_size"],
        "rms_norm_eps": words.get("norm_epsilon") or 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": words.get("rotary_base") or 10000.0},
        "tie_word_embeddings": not words.get("untie_embeddings_and_output_weights"),
        "hidden_act": "silu",
    }
    if (share := words.get("rotary_percent") or 1.0) != 1.0 or name.startswith("Glm"):
        hf["rope_parameters"]["partial_rotary_factor"] = hf["partial_rotary_factor"] = share
    if name.startswith("Glm"):
        hf["attention_bias"] = bool(words.get("add_qkv_bias"))
    if name == "Glm4MoeForCausalLM" and words.get("mtp_num_layers"):
        hf["num_nextn_predict_layers"] = words["mtp_num_layers"]
    if words.get("num_experts"):
        hf |= _experts(name, words)
    given = {key: value for key, value in words.items() if value is not None and key != "override_hf_config"}
    if wrong := problems(given, family(name), hf):
        raise ConfigError("\n".join([f"[model] describes no model of a known family; the nearest is {name}:", *wrong]))
    return hf


def architecture_of(words: Mapping[str, Any]) -> str:
    """The architecture that has what the words ask for."""
    if words.get("num_experts"):
        return "Glm4MoeForCausalLM" if words.get("moe_router_score_function") == "sigmoid" else "Qwen3MoeForCausalLM"
    if words.get("post_self_attn_layernorm"):
        return "Glm4ForCausalLM"
    if words.get("qk_layernorm"):
        return "Qwen3ForCausalLM"
    return "Qwen2ForCausalLM" if words.get("add_qkv_bias") else "LlamaForCausalLM"


def _experts(name: str, words: Mapping[str, Any]) -> dict[str, Any]:
    pattern = tuple(words.get("moe_layer_freq") or (1,) * words["num_layers"])
    common = {
        "num_experts_per_tok": words["moe_router_topk"],
        "moe_intermediate_size": words["moe_ffn_hidden_size"],
    }
    if name == "Qwen3MoeForCausalLM":
        return common | {
            "num_experts": words["num_experts"],
            "norm_topk_prob": not words.get("moe_router_pre_softmax"),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [number for number, sparse in enumerate(pattern) if not sparse],
        }
    shared = words.get("moe_shared_expert_intermediate_size") or 0
    return common | {
        "n_routed_experts": words["num_experts"],
        "n_shared_experts": shared // words["moe_ffn_hidden_size"],
        "first_k_dense_replace": next((number for number, sparse in enumerate(pattern) if sparse), len(pattern)),
        "routed_scaling_factor": words.get("moe_router_topk_scaling_factor") or 1.0,
        "norm_topk_prob": True,
        "n_group": words.get("moe_router_num_groups") or 1,
        "topk_group": words.get("moe_router_group_topk") or 1,
        "use_qk_norm": bool(words.get("qk_layernorm")),
    }
