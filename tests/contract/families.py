"""Tiny random models of all families, made by transformers.

Their weights are larger than usual, so that errors show.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB_SIZE = 96
COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    dtype="float32",
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOWS = dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
GLM_EXPERTS = EXPERTS | dict(
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.5,
)
GATED_EXPERTS = {"num_experts": 8, "shared_expert_intermediate_size": 48}
GEMMA3 = dict(
    tie_word_embeddings=True,
    query_pre_attn_scalar=24,
    sliding_window=5,
    layer_types=["sliding_attention", "full_attention"] + ["sliding_attention"] * 2,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
MINIMAX = dict(
    num_experts_per_tok=2,
    num_local_experts=8,
    rotary_dim=8,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    # SGLang reads these keys of the published config.json
    scoring_func="sigmoid",
    use_qk_norm=True,
    use_routing_bias=True,
    qk_norm_type="per_layer",
)
GPT_OSS = dict(
    num_experts_per_tok=2,
    num_local_experts=8,
    intermediate_size=96,
    sliding_window=5,
    swiglu_limit=7.0,  # SGLang reads this key of the published config.json
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
)
HYBRID = dict(
    # A token whose query and key are almost orthogonal has a tiny output, whose rounding errors the
    # norm after linear attention would enlarge.
    rms_norm_eps=1e-3,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention"] + ["linear_attention"] * 2,
)
EVEN_HYBRID = HYBRID | {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
}
LATENT = GLM_EXPERTS | dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    head_dim=8,  # in transformers the size of the rotary part
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
DEEPSEEK_V3 = LATENT | dict(
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    rope_parameters=YARN,
    moe_layer_freq=1,
    # SGLang reads these keys of the published config.json
    topk_method="noaux_tc",
    scoring_func="sigmoid",
)
# name: (prefix of the classes of transformers, options of the config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-long": ("Qwen3", WINDOWS | {"rope_parameters": LONG_ROPE}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"num_experts": 8, "mlp_only_layers": [1]}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | GATED_EXPERTS | {"norm_topk_prob": False}),
    "llama3": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "gemma3": ("Gemma3", GEMMA3),
    "glm4-0414": ("Glm4", {"attention_bias": True}),
    "minimax-m2-moe": ("MiniMaxM2", MINIMAX),
    "gpt-oss-moe": ("GptOss", GPT_OSS),
    "qwen3-next-moe": ("Qwen3Next", HYBRID | EXPERTS | GATED_EXPERTS | {"mlp_only_layers": [2]}),
    "qwen3.5": ("Qwen3_5", HYBRID),
    "qwen3.5-moe": ("Qwen3_5Moe", HYBRID | EXPERTS | GATED_EXPERTS),
    "deepseek-v3-moe": ("DeepseekV3", DEEPSEEK_V3),
    "glm4.7-flash-moe": ("Glm4MoeLite", LATENT | {"mlp_layer_types": ["dense"] + ["sparse"] * 3}),
    "glm4.5-moe": ("Glm4Moe", GLM_EXPERTS | {"attention_bias": True, "use_qk_norm": True}),
}
WITH_TENSOR_PARALLEL = {
    "gpt-oss-moe": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
}
"""Settings that a family needs in addition to those of tensor parallelism."""
WITH_MTP = "-mtp"
MTP, LATENT_MTP = f"glm4.5-moe{WITH_MTP}", f"deepseek-v3-moe{WITH_MTP}"
"""Two families with a layer for multi-token prediction, which transformers does not have."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-yarn": ("Qwen2", {"rope_parameters": LONG_ROPE}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": LONG_ROPE}),
    "qwen2.5-linear": (
        "Qwen2",
        WINDOWS | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "qwen2-moe-window": (
        "Qwen2Moe",
        EXPERTS | GATED_EXPERTS | WINDOWS | {"norm_topk_prob": False},
    ),
    "qwen3-moe-window": (
        "Qwen3Moe",
        EXPERTS
        | WINDOWS
        | {
            "num_experts": 8,
            "rope_parameters": LONG_ROPE
            | {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    # SGLang reads full_attention_interval, not layer_types, and gives every layer experts
    "qwen3-next-even-moe": ("Qwen3Next", EVEN_HYBRID | EXPERTS | GATED_EXPERTS),
    "qwen3.5-even": ("Qwen3_5", EVEN_HYBRID),
    "qwen3.5-even-moe": ("Qwen3_5Moe", EVEN_HYBRID | EXPERTS | GATED_EXPERTS),
    # matrices of one and of several FP8 blocks, some of which are partial
    "deepseek-v3-wide-moe": (
        "DeepseekV3",
        DEEPSEEK_V3
        | {
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 160,
            "q_lora_rank": 96,
            "kv_lora_rank": 192,
        },
    ),
    "gemma3-capped": ("Gemma3", GEMMA3 | {"final_logit_softcapping": 2.0}),
    "llama3.1-shorter": (
        "Llama",
        {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 64}},
    ),
}
"""Variants of some families: other options, weights of the same kinds."""
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 3, 2]}
QWEN_TOWER = dict(
    depth=3, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64,
    num_position_embeddings=64,
)  # fmt: skip
WINDOWED_TOWER = dict(
    depth=3, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64, patch_size=14,
    window_size=56, fullatt_block_indexes=[1],
)  # fmt: skip
"""Windows of 2 x 2 tokens in layers 0 and 2."""
GLM_TOWER = dict(
    depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64, image_size=56
)
SMALL_TOWER = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56,
    patch_size=14,
)  # fmt: skip
WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}, "tie_word_embeddings": True},
        QWEN_TOWER | {"deepstack_visual_indexes": [0, 1]},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"rope_parameters": MROPE, "tie_word_embeddings": True},
        WINDOWED_TOWER,
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        EXPERTS
        | {
            "num_experts": 8,
            "moe_intermediate_size": 48,
            "rope_parameters": MROPE | {"mrope_interleaved": True},
        },
        QWEN_TOWER | {"deepstack_visual_indexes": [0, 1, 2]},  # engines assume three
    ),
    "qwen3.5-moe-saved": ("Qwen3_5Moe", EVEN_HYBRID | EXPERTS | GATED_EXPERTS, QWEN_TOWER),
    "qwen3.5-published": ("Qwen3_5", EVEN_HYBRID, QWEN_TOWER),
    "qwen3.5-moe-published": ("Qwen3_5Moe", EVEN_HYBRID | EXPERTS | GATED_EXPERTS, QWEN_TOWER),
    "glm4.1v": (
        "Glm4v",
        {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        GLM_TOWER,
    ),
    "glm4.5v-moe": (
        "Glm4vMoe",
        GLM_EXPERTS
        | {
            "attention_bias": True,
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
        },
        GLM_TOWER,
    ),
    "gemma3-published": ("Gemma3", GEMMA3, SMALL_TOWER),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
        SMALL_TOWER | {"model_type": "pixtral", "head_dim": 16},
    ),
}
"""Models with an encoder of images, in the form of the published folders.

Name: (prefix of the classes of transformers, options of the text and of the encoder of images).
"""
STACKED_EXPERTS = {"qwen3-vl-moe": True, "qwen3.5-moe-published": False}
"""Those with all experts of a layer in one tensor, and whether it has the input before the output."""
FROM_OUTSIDE: dict[str, tuple[str, dict[str, Any]]] = {"ernie4.5": ("Ernie4_5", {})}
"""Families that an external package adds in docs/extending.md."""
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-wide": ("Qwen3", {"intermediate_size": 128, "max_position_embeddings": 4096}),
    "qwen3-moe-served": ("Qwen3Moe", EXPERTS | {"num_experts": 8}),
}
"""Models that SGLang shards over two ranks on a CPU without padding.

All layers of the MoE model have experts: SGLang ignores ``mlp_only_layers`` of Qwen3-MoE.
"""


def make_family(folder: Path, name: str, *, as_published: bool = True) -> None:
    """Save the tiny model of a family; norms are not all one and biases not all zero.

    ``as_published`` false: as transformers saves it.
    """
    import transformers

    kind, config = _config(name)
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}{_task(name)}")(config)
    set_weights(model, kind)
    model.save_pretrained(folder)
    if name.endswith(WITH_MTP):
        _add_mtp_layer(folder)
    if as_published:
        stack_experts(folder, name)


def stack_experts(folder: Path, name: str) -> None:
    """Store the experts of each layer as in the published folders: gate and up of all in one tensor.

    Other models than those of ``STACKED_EXPERTS`` are unchanged. transformers stores each expert in
    its own tensors, or the others without the transposition.
    """
    if name not in STACKED_EXPERTS:
        return
    tensors = load_file(folder / "model.safetensors")
    stacked = {name: one for name, one in tensors.items() if ".mlp.experts." not in name}
    experts = range(8)
    for layer in range(COMMON["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        if prefix + "gate_up_proj" in tensors:
            pair = [tensors[prefix + end] for end in ("gate_up_proj", "down_proj")]
        else:
            gate, up, down = (
                [tensors[f"{prefix}{one}.{part}_proj.weight"] for one in experts]
                for part in ("gate", "up", "down")
            )
            pair = [
                torch.stack(list(map(torch.cat, zip(gate, up, strict=True)))),
                torch.stack(down),
            ]
        for end, one in zip(("gate_up_proj", "down_proj"), pair, strict=True):
            stacked[prefix + end] = (one.mT if STACKED_EXPERTS[name] else one).contiguous()
    save_file(stacked, folder / "model.safetensors", metadata={"format": "pt"})


def load_model(folder: Path) -> torch.nn.Module:
    """Return transformers' model of a folder, in float32 and with plain attention."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_images = "text_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model: torch.nn.Module = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def _task(name: str) -> str:
    return "ForConditionalGeneration" if name in WITH_IMAGES else "ForCausalLM"


def set_weights(model: torch.nn.Module, kind: str) -> None:
    """Fill all weights of a model of transformers with random values; ``kind`` names its class."""
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_weight = tensor.is_floating_point() and "inv_freq" not in key
            if is_weight and "embed_scale" not in key:
                tensor.copy_(torch.randn_like(tensor) * 0.2 + _center(kind, key))


def _center(kind: str, key: str) -> float:
    """Return the mean of a weight: 1 for a norm, unless the model itself adds 1, else 0."""
    kinds = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Gemma3")
    adds_one = kind in kinds and "linear_attn" not in key
    return 1.0 if "norm" in key and not adds_one else 0.0


def _add_mtp_layer(folder: Path) -> None:
    """Add a layer for multi-token prediction, named as in the published GLM-4.5 folders.

    It is a decoder layer after the last, with the tensors that join it to the model.
    """
    path, number, hidden = (
        folder / "model.safetensors",
        COMMON["num_hidden_layers"],
        COMMON["hidden_size"],
    )
    tensors = load_file(path)
    last, behind = f"model.layers.{number - 1}.", f"model.layers.{number}."
    more = {
        name.replace(last, behind): torch.randn_like(one) * 0.2
        for name, one in tensors.items()
        if last in name
    }
    more[f"{behind}mlp.gate.e_score_correction_bias"] *= 0.1  # every expert gets tokens
    for name in ("enorm", "hnorm", "shared_head.norm"):
        more[f"{behind}{name}.weight"] = torch.randn(hidden) * 0.2 + 1.0
    more[f"{behind}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    more[f"{behind}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more[f"{behind}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | more, path, metadata={"format": "pt"})
    _name_mtp_layer(folder)


def _name_mtp_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def make_family_config(folder: Path, name: str) -> None:
    """Save the configuration of a family's tiny model, without weights."""
    kind, config = _config(name)
    config.architectures = [f"{kind}{_task(name)}"]
    config.save_pretrained(folder)
    if name.endswith(WITH_MTP):
        _name_mtp_layer(folder)


def _config(name: str) -> tuple[str, Any]:
    import transformers

    if name in WITH_IMAGES:
        return _config_with_images(name)
    kind, options = (FAMILIES | VARIANTS | FROM_OUTSIDE | SERVED)[name.removesuffix(WITH_MTP)]
    of_text = getattr(transformers, f"{kind}TextConfig", None)  # multimodal models have one
    kind_of_config = of_text or getattr(transformers, f"{kind}Config")
    options = COMMON | options
    if kind == "Qwen3_5Moe":
        del options["intermediate_size"]  # absent in published files: no layer is dense
    return kind, kind_of_config(**options)


def _config_with_images(name: str) -> tuple[str, Any]:
    import transformers

    kind, text, images = WITH_IMAGES[name]
    options = COMMON | text
    if kind == "Qwen3_5Moe":
        del options["intermediate_size"]
    tied = options["tie_word_embeddings"]
    config = getattr(transformers, f"{kind}Config")(
        text_config=options, vision_config=images, tie_word_embeddings=tied
    )
    return kind, config


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a Hugging Face folder, from all of its files."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
