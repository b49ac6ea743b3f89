"""Packed rows with images compared with transformers, at every kind of layout."""

from __future__ import annotations

import importlib.util
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlpost.config.tree import Config
from rlpost.images.processor import ImageProcessor
from rlpost.trainer.torch_dist.reader import read_metadata
from rlpost.trainer.weights.importer import HuggingFaceFolder
from tests.contract.actor_ranks import run_ranks
from tests.contract.critic_ranks import returns_of, train_critic
from tests.contract.families import load_model
from tests.contract.image_ranks import (
    MOST_PIXELS,
    ImageModel,
    adapt,
    as_stored,
    look_at_images,
    make_image_model,
    move_and_resume,
    of_transformers,
    resume_otherwise,
    step_of,
    train_and_resume,
)
from tests.settings import rank_config

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
DENSE, MOE, HYBRID = "qwen3-vl", "qwen3-vl-moe", "qwen3.5-published"
CHUNKS = "qwen2.5-vl"
"""Its frequencies rotate by the axes in chunks, and its encoder's attention has windows."""
GLM, GLM_MOE = "glm4.1v", "glm4.5v-moe"
"""Chunks of half a head; the first rotates neighbours with each other."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
GATHER = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TP2 = {"tensor_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ALL = {"vision_tower": "all"}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "recomputed, with a reference": (DENSE, 1, FULL | KL),
    "shared beginnings": (DENSE, 1, {"share_prefix": True}),
    "tp2": (DENSE, 2, TP2 | GATHER),
    "tp2-sp, recomputed": (DENSE, 2, TP2 | FULL | {"sequence_parallel": True}),
    "cp2": (DENSE, 2, {"context_parallel_size": 2}),
    "pp2": (DENSE, 2, {"pipeline_model_parallel_size": 2}),
    "all, recomputed": (DENSE, 1, FULL | ALL),
    "all, tp2": (DENSE, 2, TP2 | ALL),
    "all, tp2-sp": (DENSE, 2, TP2 | ALL | {"sequence_parallel": True}),
    "all, cp2": (DENSE, 2, {"context_parallel_size": 2} | ALL),
    "all, pp2, recomputed": (DENSE, 2, {"pipeline_model_parallel_size": 2} | FULL | ALL),
    "all, dp2": (DENSE, 2, GATHER | ALL),
    "all, shared beginnings": (DENSE, 1, {"share_prefix": True} | ALL),
    "merger": (DENSE, 1, {"vision_tower": "merger"}),
    "merger, dp2, recomputed": (DENSE, 2, GATHER | FULL | {"vision_tower": "merger"}),
    "all, experts": (MOE, 2, EP2 | ALL),
    "all, hybrid": (HYBRID, 1, ALL),
    "chunks": (CHUNKS, 1, {}),
    "all, chunks, cp2": (CHUNKS, 2, {"context_parallel_size": 2} | ALL),
    "all, chunks, tp2-sp": (CHUNKS, 2, TP2 | ALL | {"sequence_parallel": True}),
    "merger, neighbours": (GLM, 1, {"vision_tower": "merger"}),
    "all, neighbours, tp2-sp": (GLM, 2, TP2 | ALL | {"sequence_parallel": True}),
    "all, neighbours, cp2": (GLM, 2, {"context_parallel_size": 2} | ALL),
    "all, half a head, experts": (GLM_MOE, 2, EP2 | ALL),
    "half a head, tp2-sp": (GLM_MOE, 2, TP2 | {"sequence_parallel": True}),
    "experts": (MOE, 2, EP2),
    "hybrid": (HYBRID, 1, {}),
    "hybrid, tp2-sp": (HYBRID, 2, TP2 | {"sequence_parallel": True}),
}
MERGERS = ("merger.", "deepstack_merger_list.", "downsample.")
LIMIT = 1e-5
OF_RECURRENCES = 3
"""Times the limit, for a HYBRID: transformers' own logits in float32 are off by up to 1.5e-5."""
Made = tuple[ImageModel, list[Any], torch.Tensor, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a function that makes a model, samples, and transformers' logits and gradients."""

    @cache
    def make(name: str) -> Made:
        model = make_image_model(tmp_path_factory.mktemp("images"), name)
        samples = [
            model.sample("a", first=7),
            model.sample("a", first=7, tail=5),
            model.sample("other", first=7, tail=5),  # the same token ids, another image
            model.sample(tail=5, first=14),
            model.sample("b", "c", first=21),
            model.conversation("a", seen="other"),
            model.conversation(seen="c"),
        ]
        return model, samples, *of_transformers(model, samples)

    return make


def images_config(model: ImageModel, **settings: Any) -> Config:
    images = {"multimodal_keys": {"image": "images"}}
    return rank_config(str(model.folder), distributed_timeout_minutes=2, **images, **settings)


def is_trained(name: str, vision_tower: str) -> bool:
    """Whether --vision-tower trains a weight; those of the language model are all trained."""
    if "visual." not in name or vision_tower == "all":
        return True
    part = name.partition("visual.")[2]
    return vision_tower == "merger" and part.startswith(MERGERS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_are_those_of_transformers(made, layout):
    name, num_ranks, settings = LAYOUTS[layout]
    model, samples, expected, gradients = made(name)
    config = images_config(model, **settings)
    text = [replace(sample, images=()) for sample in samples]
    seen = run_ranks(
        look_at_images, num_ranks, config, make=model.make, samples=samples, without=text
    )
    scale = max(1.0, expected.abs().max().item())
    limit = LIMIT * (OF_RECURRENCES if name == HYBRID else 1)
    for one in seen:
        if one["logits"] is None:  # not on the last stage
            continue
        held = torch.from_numpy(one["held"])
        is_token = held >= 0
        ours = torch.from_numpy(one["logits"])
        assert (ours[is_token] - expected[held[is_token]]).abs().max() < limit * scale
        # the same logits of a model that sees no image would differ
        blind = torch.from_numpy(one["without"])
        is_after = (held >= samples[0].images[0].end) & (held < len(samples[0].token_ids))
        rows = is_after.nonzero()[:, 0]  # of the first sample, in both
        assert (ours[rows] - blind[rows]).abs().max() > 0.01 * scale
    if (
        "use_kl_loss" in settings
    ):  # the reference has the same weights, and must see the same images
        assert abs(seen[0]["metrics"]["train/ref_kl"]) < 1e-6
    compare_gradients(seen[0], gradients, settings.get("vision_tower", "frozen"), limit)


def compare_gradients(
    seen: dict[str, Any],
    gradients: dict[str, torch.Tensor],
    vision_tower: str,
    limit: float = LIMIT,
) -> None:
    """Compare gradients of a step, and their norm, with those of transformers."""
    found = seen["gradients"]
    encoder = {name for name in found if "visual." in name}
    zero = encoder - gradients.keys()  # transformers runs no encoder for text
    assert found.keys() - zero == {name for name in gradients if is_trained(name, vision_tower)}
    assert all(not found[name].any() for name in zero)
    squares = sum(gradients[name].double().square().sum().item() for name in found.keys() - zero)
    assert seen["metrics"]["train/grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-4)
    for name, theirs in gradients.items():
        if name in found:
            ours = torch.from_numpy(found[name])
            theirs = theirs.mT if theirs.shape != ours.shape else theirs  # stacked experts
            scale = max(1.0, theirs.abs().max().item())
            assert (ours - theirs).abs().max() < limit * scale, name


TEXT_ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "all, text alone": (1, ALL),
    "all, text alone, recomputed": (1, ALL | FULL),
    "all, dp2, one rank text alone": (2, ALL | GATHER),
    "all, dp2, one rank text alone, recomputed": (2, ALL | GATHER | FULL),
    "merger, dp2, one rank text alone": (2, GATHER | {"vision_tower": "merger"}),
}


@pytest.mark.parametrize("row", TEXT_ROWS)
def test_a_micro_batch_of_text_alone_takes_part_in_the_training_of_the_encoder(made, row):
    num_ranks, settings = TEXT_ROWS[row]
    model = made(DENSE)[0]
    text = model.sample(tail=25, first=14)
    samples = [text] if num_ranks == 1 else [model.sample("a", first=7), text]
    _, gradients = of_transformers(model, samples)
    seen = run_ranks(
        step_of, num_ranks, images_config(model, **settings), make=model.make, samples=samples
    )
    assert any(one["micro_batches"] == [0] for one in seen)
    compare_gradients(seen[0], gradients, settings["vision_tower"])


FROZEN: dict[str, dict[str, Any]] = {
    "a part of both": ALL | {"only_train_params_name_list": ("linear_fc1",)},
    "the encoder's blocks": ALL | {"freeze_params_name_list": ("vision_model.blocks",)},
    "the language model": ALL | {"only_train_params_name_list": ("vision_model",)},
    "all but mergers": {
        "vision_tower": "merger",
        "freeze_params_name_list": ("^decoder", "^embedding"),
    },
}
TRAINED = {
    "a part of both": r"linear_fc1|gate_proj|up_proj",
    "the encoder's blocks": r"^(?!.*visual\.blocks)",
    "the language model": r"visual\.",
    "all but mergers": r"visual\.(merger|deepstack_merger_list|downsample)\.",
}
"""Hugging Face names of the weights that are trained."""


@pytest.mark.parametrize("frozen", FROZEN)
def test_weights_of_the_encoder_are_frozen_by_name(made, frozen):
    model, samples, _, gradients = made(DENSE)
    config = images_config(model, lr=1e-3, adam_eps=1e-6, **FROZEN[frozen])
    (seen,) = run_ranks(step_of, 1, config, make=model.make, samples=samples)
    before, after = seen["before"], seen["after"]
    changed = {name for name in after if (before[name] != after[name]).any()}
    trained = {name for name in gradients if re.search(TRAINED[frozen], name)}
    assert changed == {name for name in trained if gradients[name].abs().max() > 0}
    squares = sum(gradients[name].double().square().sum().item() for name in trained)
    assert seen["metrics"]["train/grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-4)


def test_the_encoder_is_offloaded_with_the_weights_and_is_in_no_checkpoint(made, tmp_path):
    model, samples, *_ = made(DENSE)
    config = images_config(model)
    (seen,) = run_ranks(
        move_and_resume, 1, config, make=model.make, samples=samples, folder=str(tmp_path / "saved")
    )
    assert seen["held"] == 0
    assert (seen["restored"] == seen["imported"]).all()
    assert (seen["resumed"] == seen["imported"]).all()
    stored = read_metadata(str(tmp_path / "saved")).state_dict_metadata
    assert any("decoder" in key for key in stored)
    assert not any(word in key for key in stored for word in ("visual", "blocks", "merger"))


@pytest.mark.parametrize(
    ("name", "part", "other"), [(DENSE, "all", "merger"), (GLM, "merger", "all")]
)
def test_a_trained_encoder_is_updated_saved_exported_and_sent(made, tmp_path, name, part, other):
    """One step is that of transformers' model with torch's Adam; a resumed one is bit for bit."""
    model, samples, _, gradients = made(name)
    gradients = {key: grad for key, grad in gradients.items() if is_trained(key, part)}
    saved, export = str(tmp_path / "saved"), tmp_path / "export"
    adam = {"lr": 1e-3, "weight_decay": 0.0, "adam_eps": 1e-3, "clip_grad": 0.5}
    config = images_config(model, vision_tower=part, **adam)
    seen = run_ranks(
        train_and_resume,
        2,
        config,
        make=model.make,
        samples=samples,
        folder=saved,
        export=str(export),
    )
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in gradients.values()))
    original, exported = HuggingFaceFolder(model.folder), HuggingFaceFolder(export)
    assert exported.file_of.keys() == original.file_of.keys()
    for key, grad in gradients.items():
        grad = grad * min(1.0, 0.5 / norm)
        expected = original.read(key) - 1e-3 * grad / (grad.abs() + 1e-3)
        assert (exported.read(key) - expected).abs().max() < 2e-6, key
    for key in original.file_of:
        if key.startswith("model.visual."):
            is_changed = bool((exported.read(key) != original.read(key)).any())
            assert is_changed == is_trained(key, part), key
    for one in seen:
        assert one["first"]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert one["loaded"] == one["saved"] != one["imported"]
        assert one["resumed"] == one["trained"] != one["saved"]
        assert one["again"] == one["second"]
        assert one["sent"] == sorted(key for key in original.file_of if is_trained(key, part))
    for which, reason in (
        ("frozen", "has the trained weights .*merger.* of the encoder of images"),
        (other, "--vision-tower asks for others"),
    ):
        config = images_config(model, vision_tower=which)
        (said,) = run_ranks(resume_otherwise, 1, config, make=model.make, folder=saved)
        assert re.search(reason, said)


DENSE_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ADAPTED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2-sp, recomputed": (DENSE, 2, TP2 | FULL | {"sequence_parallel": True}),
    "chunks": (CHUNKS, 1, {}),
    "experts, ep2": (MOE, 2, EP2 | FULL | {"lora_targets": ("linear_qkv", "linear_proj")}),
    "adapters of experts, ep2": (
        MOE,
        2,
        EP2 | GATHER | {"lora_targets": ("linear_qkv", "experts")},
    ),
}
SHARED_INPUT = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}
"""Modules whose adapters have one A, by the first of them."""
RANK, ALPHA = 4, 8.0


@pytest.mark.parametrize("row", ADAPTED)
def test_adapters_of_the_language_model_are_trained_with_images(made, tmp_path, row):
    """Logits are those of the merged folder in transformers, and in PEFT.

    Gradients follow from that of the merged weight, G: alpha / rank G A^T for B, and
    alpha / rank B^T G for A, summed over the modules that share it.
    """
    name, num_ranks, layout = ADAPTED[row]
    model, samples, *_ = made(name)
    adapters = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_targets": DENSE_LAYERS}
    config = images_config(model, lr=1e-2, adam_eps=1e-4, **adapters | layout)
    folder = str(tmp_path)
    seen = run_ranks(adapt, num_ranks, config, make=model.make, samples=samples, folder=folder)
    merged = replace(model, folder=tmp_path / "merged")
    expected, gradients = of_transformers(merged, samples)
    limit = LIMIT * max(1.0, expected.abs().max().item())
    num_tokens = len(expected)
    assert (torch.from_numpy(seen[0]["logits"])[:num_tokens] - expected).abs().max() < limit
    if "experts" in config.lora.lora_targets:
        return  # PEFT has none of them; a step in test_lora.py has their gradients
    factors = load_file(tmp_path / "peft/adapter_model.safetensors")
    compare_factors(seen[0]["gradients"], factors, gradients)
    assert ImageProcessor.of(tmp_path / "peft").max_pixels == MOST_PIXELS, "as in training"
    if importlib.util.find_spec("peft") is not None:
        compare_with_peft(model, samples, tmp_path / "peft", expected)


def compare_factors(
    found: dict[str, Any], factors: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> None:
    """Compare gradients of factors with those that follow from the gradients of merged weights."""

    def factor(module: str, which: str) -> torch.Tensor:
        current = re.sub("^model.layers", "model.language_model.layers", module)
        return factors[f"base_model.model.{current}.lora_{which}.weight"]

    assert len(found) > 0 and not any("visual" in name for name in factors)
    for name, ours in found.items():
        module, which = name.removesuffix(".weight").split(".lora_")
        parent, last = module.rsplit(".", 1)
        if which == "B":
            theirs = gradients[f"{module}.weight"] @ factor(module, "A").T
        else:
            modules = [f"{parent}.{one}" for one in SHARED_INPUT.get(last, (last,))]
            theirs = sum(factor(one, "B").T @ gradients[f"{one}.weight"] for one in modules)
        theirs = ALPHA / RANK * theirs
        limit = 10 * LIMIT * max(1.0, theirs.abs().max().item())
        assert (torch.from_numpy(ours) - theirs).abs().max() < limit, name


def compare_with_peft(
    model: ImageModel, samples: list[Any], folder: Path, expected: torch.Tensor
) -> None:
    """Compare the logits of the exported adapters in PEFT; no module of the encoder has one."""
    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapter keys")  # those that PEFT drops
        adapted = peft.PeftModel.from_pretrained(load_model(model.folder), folder)
    assert not any("lora" in name and "visual" in name for name, _ in adapted.named_modules())
    with torch.no_grad():
        theirs = torch.cat([adapted(**model.inputs(one)).logits[0] for one in samples])
    assert (theirs - expected).abs().max() < LIMIT * max(1.0, expected.abs().max().item())


CRITICS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2-sp": (DENSE, 2, TP2 | {"sequence_parallel": True}),
    "chunks": (CHUNKS, 1, {}),
    "pp2": (DENSE, 2, {"pipeline_model_parallel_size": 2}),
    "neighbours, cp2": (GLM, 2, {"context_parallel_size": 2}),
}


@pytest.mark.parametrize("row", CRITICS)
def test_a_critic_reads_images_as_transformers_model_with_its_head(made, tmp_path, row):
    """Values and gradients of the value loss, with the exported weights; no step changes them."""
    name, num_ranks, layout = CRITICS[row]
    model = made(name)[0]
    samples = [
        model.conversation("a", seen="other"),
        model.conversation(seen="c"),
        model.sample("b", "c", first=21),
    ]
    config = images_config(model, advantage_estimator="ppo", lr=0.0, value_clip=None, **layout)
    seen = run_ranks(
        train_critic,
        num_ranks,
        config,
        make=model.make,
        steps=[samples],
        export=str(tmp_path),
    )
    values = {key: value for one in seen for key, value in one["values"][0].items()}
    folder = tmp_path / "critic"
    theirs = load_model(folder).model  # AutoModel does not know the names in older folders
    stored = HuggingFaceFolder(folder)
    head = stored.read("score.weight").requires_grad_()
    loss = torch.zeros(())
    for sample in samples:
        hidden = theirs(**model.inputs(sample)).last_hidden_state[0]
        expected = (hidden @ head.T)[sample.prompt_length - 1 : -1, 0] + stored.read("score.bias")
        ours = torch.tensor(values[tuple(sample.token_ids)])
        assert (ours - expected).abs().max() < LIMIT * max(1.0, expected.abs().max().item())
        mask = torch.tensor(list(sample.loss_mask), dtype=torch.bool)
        error = (expected - torch.tensor(list(returns_of(sample))))[mask].square()
        loss = loss + 0.5 * error.mean() / len(samples)
    loss.backward()
    assert head.grad is not None
    gradients = {"score.weight": head.grad}
    for key, weight in theirs.named_parameters():
        if weight.grad is not None:
            gradients |= as_stored(f"model.{key}", weight.grad, stored.file_of)
    found = seen[0]["gradients"]
    assert {key for key in gradients if "visual." not in key} == found.keys() - {"score.bias"}
    for key, ours in found.items():
        if key != "score.bias":
            limit = LIMIT * max(1.0, gradients[key].abs().max().item())
            assert (torch.from_numpy(ours) - gradients[key]).abs().max() < limit, key


RESUMED = {"pp2": CRITICS["pp2"], "cp2": (DENSE, 2, {"context_parallel_size": 2})}


@pytest.mark.parametrize("row", RESUMED)
def test_a_critic_with_images_is_resumed_bit_for_bit(made, tmp_path, row):
    """In other processes, so that no rank has features of images or old values."""
    name, num_ranks, layout = RESUMED[row]
    model = made(name)[0]
    steps = [
        [model.conversation("a", seen="other"), model.sample("b", "c", first=21)],
        [model.sample("a", first=14), model.conversation(seen="c")],
        [model.conversation("b", seen="a"), model.sample("other", first=28)],
    ]
    config = images_config(model, advantage_estimator="ppo", lr=1e-3, critic_lr=2e-3, **layout)
    train = partial(run_ranks, train_critic, num_ranks, config, make=model.make, steps=steps)
    saved = str(tmp_path / "saved")
    whole, resumed = train(save=saved), train(load=saved)
    for one, again in zip(whole, resumed, strict=True):
        assert again["values"] == one["values"][2:]
        assert again["metrics"] == one["metrics"][4:] and again["policy"] == one["policy"][2:]
        for key in ("hash", "policy_hash", "num_steps"):
            assert again[key] == one[key]
    assert any(one["values"][2] for one in whole) and whole[0]["num_steps"] == 6
