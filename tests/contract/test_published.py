"""Models with images in their published form: their config.json, as the trainer and engines read it.

The values are those of the config.json of each model on the Hugging Face hub; keys of the encoder of
images that no text depends on are left out.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlpost.cli.resolved_model import differences, engine_model, trainer_model
from rlpost.cli.stack_check import text_model
from rlpost.config.checks.images import image_model_problems
from rlpost.config.plan.cards import CARDS
from rlpost.config.plan.estimate import estimate
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.step_time import step_time
from rlpost.config.plan.vision import image_tokens, planned_vision
from rlpost.config.tree import Config
from rlpost.errors import WeightError
from rlpost.extensions.rehearsal.all_ranks.published import published
from rlpost.images.limits import FEATURE_CACHE_BYTES
from rlpost.models.config_file import language_model
from rlpost.trainer.model_description import read_description
from tests.contract.actor_ranks import look, run_ranks
from tests.contract.families import load_folder, load_model, make_family
from tests.contract.samples import STEPS
from tests.settings import rank_config
from tests.unit.config.test_models import PUBLISHED

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def whole(architecture: str, kind: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A config.json with the keys of its language model nested."""
    return {"architectures": [architecture], "model_type": kind, "text_config": text, **more}


def nested(name: str, kind: str, **more: Any) -> dict[str, Any]:
    """The keys of a model that is also published alone."""
    alone = ("architectures", "tie_word_embeddings")
    text = {key: value for key, value in PUBLISHED[name].items() if key not in alone}
    return {**text, "model_type": kind, **more}


MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
MROPE_3_5 = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GLM_4_5V = {
    "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 65536,
    "model_type": "glm4v_moe_text", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}, "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 32768, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
    "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip
ENCODER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 2048,
}  # fmt: skip
SMALLER_ENCODER = ENCODER | {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17],
    "out_hidden_size": 2560,
}  # fmt: skip
QWEN = "Qwen3VLForConditionalGeneration"
VIRTUAL = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2}
MODELS = {
    "Qwen3-VL-4B": whole(
        QWEN, "qwen3_vl",
        nested("qwen3_4b", "qwen3_vl_text", rope_scaling=MROPE, rope_theta=5e6,
               max_position_embeddings=262144, tie_word_embeddings=True),
        tie_word_embeddings=True, vision_config=SMALLER_ENCODER,
    ),
    "Qwen3-VL-30B-A3B": whole(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe",
        nested("qwen3_30b_a3b", "qwen3_vl_moe_text", rope_scaling=MROPE, rope_theta=5e6,
               max_position_embeddings=262144),
        tie_word_embeddings=False, vision_config=ENCODER,
    ),
    "Qwen3.5-35B-A3B": whole(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
        nested("qwen3_5_35b_a3b", "qwen3_5_moe_text", rope_parameters=MROPE_3_5, mtp_num_hidden_layers=1),
        tie_word_embeddings=False, vision_config=ENCODER | {"deepstack_visual_indexes": []},
    ),
    "GLM-4.5V": whole(
        "Glm4vMoeForConditionalGeneration", "glm4v_moe", GLM_4_5V, tie_word_embeddings=False
    ),
    "gemma-3-4b": whole(
        "Gemma3ForConditionalGeneration", "gemma3",
        GEMMA | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    ),
    "Mistral-Small-3.1-24B": whole("Mistral3ForConditionalGeneration", "mistral3", MISTRAL),
    "Kimi-K2.5": whole(
        "KimiK25ForConditionalGeneration", "kimi_k25", nested("kimi_k2", "kimi_k2"), tie_word_embeddings=False
    ),
}  # fmt: skip


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_has_the_values_and_the_size_of_transformers(tmp_path, name):
    from transformers import AutoConfig

    description = read_description(folder_of(tmp_path, MODELS[name]))
    total = hf_shape(description.hf_config).parameters.total
    assert published(description.file_config).num_parameters == total
    if name == "Kimi-K2.5":  # transformers 5.12 has no such model
        return
    engines = text_model(AutoConfig.from_pretrained(tmp_path), description.file_config)
    ours = trainer_model(description, context=None, end_tokens=())
    assert differences(ours, engine_model(engines, generation_eos=None, context=None)) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            whole(
                "Mistral3ForConditionalGeneration", "mistral3",
                MISTRAL | {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            ),
            "llama_4_scaling_beta=0.1 is not supported",
        ),
        (
            whole(QWEN, "qwen3_vl", nested("qwen3_4b", "qwen3_vl_text", tie_word_embeddings=True),
                  tie_word_embeddings=False),
            "tie_word_embeddings is False in config.json and True in its text_config; give both",
        ),
        (
            whole("Gemma3ForConditionalGeneration", "gemma3",
                  MODELS["gemma-3-4b"]["text_config"] | {"final_logit_softcapping": 30.0}),
            "final_logit_softcapping=30.0 is not supported",
        ),
        (whole("Gemma4ForConditionalGeneration", "gemma4", {}), "'Gemma4ForConditionalGeneration' is not known"),
    ],
)  # fmt: skip
def test_what_the_decoder_lacks_is_refused_by_name(tmp_path, config, reason):
    with pytest.raises(WeightError, match=reason):
        read_description(folder_of(tmp_path, config))


def with_images(**values: Any) -> Config:
    """The settings of ranks whose prompts have images."""
    return rank_config("", multimodal_keys={"image": "images"}, bf16=True, **values)


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_of_images_runs_or_is_refused_by_name(name):
    hf = language_model(MODELS[name])
    problems = image_model_problems(with_images(), hf)
    if name.startswith("Qwen"):
        assert problems == []
    else:
        (architecture,) = MODELS[name]["architectures"]
        (problem,) = problems
        assert f"the trainer has no encoder of images for {architecture}" in problem
    assert image_model_problems(rank_config(""), hf) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"vision_config": {}}, "its vision_config has no out_hidden_size, deepstack_visual_indexes"),
        ({"vision_config": ENCODER}, "out_hidden_size = 2048 of its vision_config is not hidden_size = 2560"),
        ({"rope_scaling": MROPE | {"mrope_interleaved": False}}, "no mrope_section with mrope_interleaved"),
    ],
)  # fmt: skip
def test_an_encoder_that_config_json_does_not_describe_is_refused(changed, reason):
    (problem,) = image_model_problems(
        with_images(), language_model(MODELS["Qwen3-VL-4B"]) | changed
    )
    assert reason in problem


def test_the_first_stage_has_the_layers_that_add_features():
    hf = language_model(MODELS["Qwen3-VL-4B"])  # 36 layers, of which three add features
    stages = {"pipeline_model_parallel_size": 18}
    uneven = {"decoder_first_pipeline_num_layers": 3}
    for layout in (stages, VIRTUAL):
        (problem,) = image_model_problems(with_images(**layout), hf)
        assert "after its first 3 layers, and the first stage begins with 2" in problem
    assert image_model_problems(with_images(**stages | uneven), hf) == []
    (problem,) = image_model_problems(with_images(megatron={"apply_rope_fusion": True}), hf)
    assert "--apply-rope-fusion true" in problem


@pytest.mark.parametrize("name", ["Qwen3-VL-4B", "Qwen3.5-35B-A3B"])
def test_the_plan_counts_the_encoder_on_the_first_stage_alone(name):
    hf = language_model(MODELS[name])
    shape = hf_shape(hf)
    layout = {"pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 2}
    plans = [
        estimate(config(**layout), shape, gpu_bytes=80 * 10**9)
        for config in (with_images, partial(rank_config, "", bf16=True))
    ]
    (first, *others), (without, *same) = (plan.ranks for plan in plans)
    assert others == same
    assert shape.vision is not None
    assert first.held.weights - without.held.weights == 2 * shape.vision.parameters
    assert first.held.gradients == without.held.gradients
    assert first.saved == without.saved
    assert first.passing.kept > without.passing.kept
    of_cache = plans[0].host_bytes_per_node - plans[1].host_bytes_per_node
    assert of_cache == 2 * FEATURE_CACHE_BYTES
    times = [step_time(plan, CARDS["H100"]) for plan in plans]
    assert times[0].training > times[1].training


def test_each_data_parallel_rank_with_samples_of_a_group_encodes_its_image():
    shape = hf_shape(language_model(MODELS["Qwen3-VL-4B"])).vision
    assert shape is not None
    of_image = shape.operations(image_tokens(with_images(), shape) * shape.merge**2)

    def images_of_rank(data_parallel: int) -> float:
        config = with_images(
            actor_num_gpus_per_node=data_parallel, rollout_batch_size=16, n_samples_per_prompt=4
        )
        assert config.data_parallel_size == data_parallel
        return planned_vision(config, shape, width=2, tokens=1).operations / of_image

    assert [images_of_rank(size) for size in (1, 2, 4, 8)] == [16, 16, 16, 8]


def test_kimi_k2_5_is_deepseek_v3_with_other_names(tmp_path):
    """The published names; transformers has the decoder alone."""
    alone, folder, exported = (tmp_path / name for name in ("alone", "kimi", "exported"))
    make_family(alone, "deepseek-v3-moe")
    tensors = {f"language_model.{key}": one for key, one in load_folder(alone).items()}
    tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.randn(4, 4)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((alone / "config.json").read_text())
    folder_of(folder, whole("KimiK25ForConditionalGeneration", "kimi_k25", text))
    model = load_model(alone)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([s.token_ids])).logits[0] for s in STEPS[0]])
    settings = rank_config(str(folder), distributed_timeout_minutes=2)
    (seen,) = run_ranks(look, 1, settings, samples=STEPS[0], export=str(exported))
    ours = torch.from_numpy(seen["logits"])[: expected.size(0)]
    assert (ours - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())
    saved = load_folder(exported)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[key], tensors[key]) for key in tensors)
