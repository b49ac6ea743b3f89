"""Model FLOPs of a step: those that torch counts in transformers' models, passes, images."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace

import pytest

from rlpost.config.load import JOBS
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.driver.model_flops import (
    Flops,
    attention_layers,
    model_break_even,
    used_parameters,
)
from rlpost.models.families import FAMILIES
from rlpost.types import ImageSpan
from tests.unit.driver.test_observation import HF, config, groups

WITH_VISION = [name for name, one in FAMILIES.items() if one.vision is not None]
IMAGE = ImageSpan("a" * 64, 0, 4, (1, 4, 4))
LENGTH, ANSWERS = 128, 2


def of(hf=HF, step=1, made=None, **tables):
    return Flops(config(**tables), hf).of(made or groups(), step=step)


def counted(model, *inputs, **named) -> int:
    """Operations of a forward pass, by torch's counter; attention computes all pairs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(*inputs, **named)
    return counter.get_total_flops()


@pytest.mark.slow
def test_flops_are_three_times_those_that_torch_counts_in_a_forward_pass():
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(**{key: value for key, value in HF.items() if key != "architectures"})
    )
    total = counted(model, torch.zeros(1, LENGTH, dtype=torch.long))
    # scores and values of all pairs, half of which are masked
    attention = 2 * 2 * HF["num_hidden_layers"] * 64 * LENGTH**2
    causal = total - attention / 2
    assert of(made=groups(LENGTH)) == pytest.approx(ANSWERS * 3 * causal, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_VISION)
def test_an_image_has_the_operations_that_torch_counts_in_transformers_encoder(name):
    import torch

    from rlpost.config.plan.vision import vision_shape

    vision = FAMILIES[name].vision
    module, _, kind = vision.tower.rpartition(".")
    tower = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    sizes = {"depth": 3, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 96}
    sizes |= {"intermediate_size": 160}
    if vision.has_deep_features:
        sizes["deepstack_visual_indexes"] = [0, 1]
    if vision.layers == "gated":
        sizes["fullatt_block_indexes"] = [1]
    settings = tower.config_class(**sizes)
    hf = {"vision_config": settings.to_dict()}
    shape = vision_shape(
        hf["vision_config"], layers=vision.layers, num_deep_layers=vision.num_deep_layers(hf)
    )
    rows, columns = 16, 32
    patches = rows * columns
    model = tower._from_config(settings, attn_implementation="sdpa").eval()
    total = counted(
        model, torch.zeros(patches, shape.elements), grid_thw=torch.tensor([[1, rows, columns]])
    )
    assert shape.operations(patches) == pytest.approx(total, rel=0.01)


def test_prompts_that_answers_share_count_once_and_others_in_full():
    perf = {"share_prefix": True, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 100}
    (same,) = groups()
    first, second = same.samples
    other = replace(second, sample=replace(second.sample, prompt_ids=(9, 9, 9, 9)))
    mixed = replace(same, samples=(first, other))
    whole = of(made=[same])
    assert of(made=[mixed], perf=perf) == of(made=[mixed]) == whole
    assert of(made=[same], perf=perf) == pytest.approx(whole * (20 - 4) / 20, rel=0.02)


def test_each_pass_counts_that_the_driver_makes():
    """A forward pass has a third of the operations of training."""
    alone = of()

    def more(**tables):
        return pytest.approx(3 * (of(**tables) / alone - 1))

    assert more(grpo={"use_kl_loss": True}) == 1
    assert more(grpo={"kl_coef": 0.1}) == 2
    assert more(grpo={"keep_old_actor": True}) == 1
    two_steps = {"rollout_batch_size": 8, "num_steps_per_rollout": 2}
    assert more(rollout=two_steps) == 1
    assert more(rollout=two_steps, grpo={"use_rollout_logprobs": True}) == 0
    assert more(distillation={"use_opd": True}) == 1
    assert more(distillation={"use_opd": True, "opd_form": "loss"}) == 0


def test_matrices_under_adapters_have_no_gradients():
    attention = attention_layers(HF).operations(10) * ANSWERS
    forward = of() / 3
    assert of(lora={"lora_rank": 8}) == pytest.approx(2 * forward + attention)


def test_a_critic_counts_with_the_policy_and_alone_while_it_warms_up():
    forward = of() / 3
    critic = {"grpo": {"advantage_estimator": "ppo"}, "critic": {"num_critic_only_steps": 2}}
    assert of(step=3, **critic) == pytest.approx((3 + 4) * forward)
    assert of(step=2, **critic) == pytest.approx(4 * forward)


def published(name: str) -> dict:
    return json.loads((JOBS / f"models/{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "full", "windowed", "window", "width"),
    [
        ("gpt_oss_20b", 12, 12, 128, 64 * 2 * 64),
        ("gemma3_1b", 4, 22, 512, 4 * 2 * 256),
        ("qwen3_5_35b_a3b", 10, 0, 0, 16 * 2 * 256),
        ("deepseek_v3", 61, 0, 0, 128 * (128 + 64 + 128)),
        ("qwen3_4b", 36, 0, 0, 32 * 2 * 128),
    ],
)
def test_windows_latent_and_linear_attention_count_what_they_attend_to(
    name, full, windowed, window, width
):
    found = attention_layers(published(name))
    assert (found.full, found.windowed, found.window) == (full, windowed, window)
    assert found.width == width
    length = 1000
    pairs = full * length**2 / 2
    pairs += windowed * sum(min(position, window) for position in range(length))
    state = found.operations(length) - 2 * width * pairs
    values = 32 * 128 * 128  # value heads, and the sides of a state
    expected = 6 * 30 * values * length if name == "qwen3_5_35b_a3b" else 0
    assert state == pytest.approx(expected, abs=0.01 * 2 * width * pairs)


@pytest.mark.parametrize("name", ["gpt_oss_20b", "qwen3_5_35b_a3b", "deepseek_v3", "qwen3_4b"])
def test_at_the_break_even_length_full_attention_costs_as_much_as_the_matrices(name):
    hf = published(name)
    length, layers = model_break_even(hf), attention_layers(hf)
    full = replace(layers, windowed=0, state=0.0).operations(length)
    assert full == pytest.approx(2 * used_parameters(hf) * length)


def test_a_model_of_windows_alone_has_no_such_length():
    hf = published("gemma3_1b") | {"layer_types": ["sliding_attention"] * 26}
    assert model_break_even(hf) == math.inf


def vision_hf():
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "patch_size": 16,
        "num_heads": 2,
        "deepstack_visual_indexes": [0],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    rope["mrope_interleaved"] = True
    name = "Qwen3VLForConditionalGeneration"
    return {**HF, "architectures": [name], "vision_config": vision, "rope_parameters": rope}


def with_images(*images):
    (group,) = groups()
    samples = tuple(
        replace(one, sample=replace(one.sample, images=images)) for one in group.samples
    )
    return [replace(group, samples=samples)]


@pytest.mark.parametrize(("part", "forwards"), [("frozen", 1), ("all", ANSWERS * 3)])
def test_an_image_counts_once_while_its_encoder_is_frozen_and_in_each_answer_if_trained(
    part, forwards
):
    hf = vision_hf()
    shape = hf_shape(hf).vision
    tables = {
        "rollout": {"multimodal_keys": {"image": "images"}},
        "optimizer": {"vision_tower": part},
    }
    text = of(hf, **tables)
    one = of(hf, made=with_images(IMAGE), **tables) - text
    assert one == pytest.approx(forwards * shape.operations(16))
    again = of(hf, made=with_images(IMAGE, replace(IMAGE, start=5)), **tables) - text
    assert again == pytest.approx(one * (1 if part == "frozen" else 2))
    kl = {"grpo": {"use_kl_loss": True}}
    more = of(hf, made=with_images(IMAGE), **tables, **kl) - of(hf, **tables, **kl) - one
    assert more == pytest.approx(0 if part == "frozen" else ANSWERS * shape.operations(16))


def test_only_the_merger_s_backward_pass_counts_if_it_alone_is_trained():
    shape = hf_shape(vision_hf()).vision
    needed = shape.needed_operations(16, "merger", 1)
    assert needed == 2 * shape.operations(16) + 2 * shape.merger_operations(16)
    assert 0 < shape.merger_operations(16) < shape.operations(16)
