"""Models with images in their published form: their config.json, as the trainer and engines read it.

The values are those of the config.json of each model on the Hugging Face hub; keys of the encoder of
images that no text depends on are left out.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlpost.algorithm.schedule import schedule
from rlpost.cli.resolved_model import differences, engine_model, trainer_model
from rlpost.cli.stack_check import text_model
from rlpost.config.checks.images import image_model_problems
from rlpost.config.groups.sglang import SglangConfig
from rlpost.config.plan.cards import CARDS
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.vision import image_tokens
from rlpost.config.tree import Config
from rlpost.errors import WeightError
from rlpost.extensions.planning.estimate import estimate
from rlpost.extensions.planning.step_time import step_time
from rlpost.extensions.planning.vision_memory import (
    kept_bytes,
    kept_bytes_if_frozen,
    planned_vision,
    tokens_of_images,
)
from rlpost.images.limits import FEATURE_CACHE_BYTES
from rlpost.models.config_file import language_model
from rlpost.models.families import family_of
from rlpost.trainer.model_description import read_description
from rlpost.trainer.vision.tower import Tower
from tests.contract.actor_ranks import look, run_ranks
from tests.contract.all_ranks.published import published
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
GLM_ENCODER = {
    "depth": 24, "hidden_size": 1536, "intermediate_size": 10944, "num_heads": 12, "in_channels": 3,
    "image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": 4096, "attention_bias": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
GLM_4_1V = {
    "architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v",
    "attention_bias": True, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
    "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}, "tie_word_embeddings": False,
    "vocab_size": 151552, "image_token_id": 151343, "video_token_id": 151344, "video_start_token_id": 151341,
    "vision_config": GLM_ENCODER | {"intermediate_size": 13696},
}  # fmt: skip
"""The keys of the language model beside the encoder's."""
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
QWEN_2_5_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
    "max_position_embeddings": 128000, "max_window_layers": 70, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2,
    },
}  # fmt: skip
"""As published: the keys of the language model beside the encoder's."""
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
    "Qwen2.5-VL-3B": QWEN_2_5_VL,
    "GLM-4.5V": whole(
        "Glm4vMoeForConditionalGeneration", "glm4v_moe", GLM_4_5V, tie_word_embeddings=False,
        vision_config=GLM_ENCODER,
    ),
    "GLM-4.1V-9B": GLM_4_1V,
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
            whole(QWEN, "qwen3_vl", nested("qwen3_4b", "qwen3_vl_text", tie_word_embeddings=True)),
            "tie_word_embeddings is None in config.json and True in its text_config; give both",
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


def test_the_key_of_the_whole_says_whether_an_output_layer_is_tied(tmp_path):
    """Automodel#2268: transformers 5.5 writes true for the language model of this one."""
    config = MODELS["Qwen3-VL-30B-A3B"]
    saved = config | {"text_config": config["text_config"] | {"tie_word_embeddings": True}}
    assert not read_description(folder_of(tmp_path, saved)).tied


def with_images(**values: Any) -> Config:
    """The settings of ranks whose prompts have images."""
    return rank_config("", multimodal_keys={"image": "images"}, bf16=True, **values)


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_of_images_runs_or_is_refused_by_name(name):
    hf = language_model(MODELS[name])
    problems = image_model_problems(with_images(), hf)
    if name.startswith(("Qwen", "GLM")):
        assert problems == []
    else:
        (architecture,) = MODELS[name]["architectures"]
        (problem,) = problems
        assert f"the trainer has no encoder of images for {architecture}" in problem
    assert image_model_problems(rank_config(""), hf) == []


@pytest.mark.parametrize("name", ["Qwen3-VL-4B", "Qwen3.5-35B-A3B"])
def test_drafts_see_images_where_an_engine_gives_them_to_the_draft_layer(name):
    eagle = SglangConfig.model_validate({"sglang_speculative_algorithm": "EAGLE"})
    drafts = with_images().model_copy(update={"sglang": eagle})
    problems = image_model_problems(drafts, language_model(MODELS[name]))
    assert len(problems) == (name == "Qwen3-VL-4B"), problems
    assert all("no drafts with images for Qwen3VLFor" in one for one in problems)


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


@pytest.mark.parametrize("part", ["merger", "all"])
def test_the_plan_counts_what_is_trained_of_the_encoder(part):
    shape = hf_shape(language_model(MODELS["Qwen3-VL-4B"]))
    assert shape.vision is not None
    trained = shape.vision.parameters if part == "all" else shape.vision.of_mergers
    frozen, plan = (
        estimate(with_images(use_distributed_optimizer=False, **one), shape, gpu_bytes=80 * 10**9)
        for one in ({}, {"vision_tower": part})
    )
    assert frozen.update is not None and plan.update is not None
    (before,), (after,) = frozen.ranks, plan.ranks
    assert after.held.weights == before.held.weights
    each = after.held.gradients - before.held.gradients
    assert each == trained * before.held.gradients // before.trained.total
    more = after.held.optimizer - before.held.optimizer
    assert more == pytest.approx(trained * before.held.optimizer / before.trained.total, rel=1e-6)
    assert plan.update.total_bytes - frozen.update.total_bytes == pytest.approx(
        2 * trained, rel=1e-6
    )
    assert plan.checkpoint_bytes > frozen.checkpoint_bytes and after.saved > before.saved
    assert after.train > before.train


@pytest.mark.parametrize("where", ["prompt", "conversation"])
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("micro_batch", [{"max_tokens_per_gpu": 9216}, {"micro_batch_size": 3}])
def test_the_plan_counts_the_tokens_of_images_in_every_micro_batch(where, context, micro_batch):
    """Samples of any lengths, as many images as fit into their prompts or conversations."""
    is_packed, is_prompt = "max_tokens_per_gpu" in micro_batch, where == "prompt"
    longest = 9216
    of_images = 2048 if is_prompt else longest
    config = with_images(
        use_dynamic_batch_size=is_packed,
        context_parallel_size=context,
        actor_num_gpus_per_node=context,
        vision_tower="all",
        rollout_max_context_len=longest,
        rollout_max_prompt_len=2048 if is_prompt else 64,
        env=() if is_prompt else ("package.module:Game",),
        **micro_batch,
    )
    draw, most = random.Random(context), 0
    for longest_answer in (1, 30, longest - of_images + 1):
        images = [*[of_images] * 3, *(draw.randint(1, of_images) for _ in range(61))]
        planned = schedule(
            [one + draw.randint(0, longest_answer - 1) for one in images],
            data_parallel_size=1,
            max_tokens=config.max_tokens,
            micro_batch_size=config.perf.micro_batch_size,
        )
        most = max(most, *(sum(images[one] for one in batch) for rank in planned for batch in rank))
    of_rank = longest if is_packed else 3 * longest // context
    counted = tokens_of_images(config, of_rank)
    assert 0.9 * counted < most <= counted


@pytest.mark.parametrize("part", ["merger", "all"])
@pytest.mark.parametrize("name", ["Qwen3-VL-4B", "Qwen2.5-VL-3B", "GLM-4.1V-9B"])
def test_the_plan_counts_what_transformers_encoder_keeps(name, part):
    """Storages that autograd saves in bfloat16, between images of two sizes; three layers."""
    hf = language_model(MODELS[name])
    sizes = hf["vision_config"] | {"depth": 3}
    if "deepstack_visual_indexes" in sizes:
        sizes["deepstack_visual_indexes"] = [0, 1]
    hf = {**hf, "vision_config": sizes}
    shape, vision = hf_shape(hf).vision, family_of(hf).vision
    assert shape is not None and vision is not None
    tower = Tower(vision, hf, torch.bfloat16, which=part)
    weights = {weight.untyped_storage().data_ptr() for weight in tower.module.parameters()}

    def saved(rows: int) -> int:
        storages = dict[int, torch.UntypedStorage]()  # held, so that no address is used again

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return tensor

        pixels = np.zeros((rows * 16, shape.elements), np.float32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = tower.encode(pixels, (1, rows, 16))
        assert features.requires_grad
        return sum(storage.nbytes() for storage in storages.values())

    planned = kept_bytes if part == "all" else kept_bytes_if_frozen
    kept = saved(16) - saved(8)
    assert planned(shape, 8 * 16, 2) == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize(("part", "more"), [("merger", 0), ("all", 2)])
def test_a_trained_encoder_runs_in_every_pass(part, more, recompute):
    """``more``: the backward pass, of twice the operations."""
    shape = hf_shape(language_model(MODELS["Qwen3-VL-4B"])).vision
    assert shape is not None

    def passes(**values: Any) -> float:
        config = with_images(vision_tower=part, recompute_granularity=recompute, **values)
        of_image = shape.operations(image_tokens(config, shape) * shape.merge**2)
        samples = config.samples_per_rollout / config.data_parallel_size
        return planned_vision(config, shape, width=2, tokens=1).operations / of_image / samples

    trained = 1 + more + (recompute == "full")
    assert passes() == trained
    assert passes(use_kl_loss=True, kl_loss_coef=0.1) == trained + 1
    assert passes(kl_coef=0.1) == trained + 2


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
