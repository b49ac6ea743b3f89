"""The planner counts exactly as many parameters as transformers makes, and their bytes in FP8."""

import math

import pytest

from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import Layout
from rlpost.extensions.planning.counts import stored_bytes
from rlpost.extensions.planning.update_weights import weights_of
from rlpost.models import fp8
from rlpost.models.families import family
from tests.contract.all_ranks.published import published
from tests.unit.config.test_models import PUBLISHED

SIZES = {
    "pad_token_id": 0,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 8000,
}
DENSE = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 1408}
EXPERTS = {**DENSE, "moe_intermediate_size": 256, "num_experts_per_tok": 2}
MODELS = {
    "qwen2": DENSE,
    "qwen3": {**DENSE, "head_dim": 128, "tie_word_embeddings": True},
    "llama": {**DENSE, "num_key_value_heads": 8},
    "glm4": {**DENSE, "head_dim": 64},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "head_dim": 64, "mlp_only_layers": [1]},
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 320},
    "gemma3_text": {**DENSE, "head_dim": 128},
    "minimax_m2": {**EXPERTS, "num_local_experts": 8, "head_dim": 64, "intermediate_size": 256},
    "gpt_oss": {**EXPERTS, "num_local_experts": 8, "head_dim": 64, "intermediate_size": 256},
    "glm4_moe": {
        **EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "head_dim": 64,
    },
}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
MODELS |= {
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 2},
    "glm4_moe_lite": LATENT,
}


HYBRID = {"head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
MODELS |= {
    "qwen3_next": {
        **EXPERTS,
        **HYBRID,
        "num_experts": 8,
        "shared_expert_intermediate_size": 320,
        "mlp_only_layers": [1],
    },
    "qwen3_5_text": {**DENSE, **HYBRID},
    "qwen3_5_moe_text": {
        **{key: value for key, value in EXPERTS.items() if key != "intermediate_size"},
        **HYBRID,
        "num_experts": 8,
        "shared_expert_intermediate_size": 320,
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_counted_as_transformers_counts_them(model):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model, **MODELS[model])
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    counted = hf_shape(config.to_dict() | {"architectures": [type(made).__name__]}).parameters
    experts = sum(p.numel() for name, p in made.named_parameters() if ".experts." in name)
    assert counted.total == made.num_parameters()
    assert counted.expert == experts


FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""As Qwen3.5 is published; Qwen3-Next has them in bfloat16, and is sent and exported like it."""
IN_FP8 = ("glm4_9b", "glm45_355b", "deepseek_v3", "qwen3_next_80b_a3b", "qwen3_5_35b_a3b")


@pytest.mark.parametrize("name", IN_FP8)
def test_a_folder_in_fp8_blocks_has_the_bytes_that_the_planner_counts(name):
    """By the names that a conversion quantises, in an engine and in an update."""
    hf = PUBLISHED[name]
    model, shape = published(hf), hf_shape(hf)
    quantised = fp8.quantised_names(
        model.tensors, family(hf["architectures"][0]).rules, shared_width=shape.shared_ffn
    )
    num_bytes = 0
    for key, sides in model.tensors.items():
        if key in quantised:
            num_bytes += math.prod(sides) + 4 * math.prod(-(-side // 128) for side in sides)
        elif key not in model.buffers:  # the planner counts no biases of routers
            num_bytes += (4 if key.endswith(FLOAT32) else 2) * math.prod(sides)
    update = sum(weight.num_bytes(width=2, in_fp8=True) for weight in weights_of(shape, Layout()))
    assert num_bytes == update == stored_bytes(shape, 1)
