"""Packed rows with images compared with transformers, at every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from rlpost.trainer.torch_dist.reader import read_metadata
from tests.contract.actor_ranks import run_ranks
from tests.contract.image_ranks import (
    ImageModel,
    look_at_images,
    make_image_model,
    move_and_resume,
    of_transformers,
)
from tests.settings import rank_config

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
DENSE, MOE, HYBRID = "qwen3-vl", "qwen3-vl-moe", "qwen3.5-published"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
GATHER = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "recomputed, with a reference": (DENSE, 1, FULL | KL),
    "shared beginnings": (DENSE, 1, {"share_prefix": True}),
    "tp2": (DENSE, 2, TP2 | GATHER),
    "tp2-sp, recomputed": (DENSE, 2, TP2 | FULL | {"sequence_parallel": True}),
    "cp2": (DENSE, 2, {"context_parallel_size": 2}),
    "pp2": (DENSE, 2, {"pipeline_model_parallel_size": 2}),
    "experts": (MOE, 2, {"expert_model_parallel_size": 2}),
    "hybrid": (HYBRID, 1, {}),
    "hybrid, tp2-sp": (HYBRID, 2, TP2 | {"sequence_parallel": True}),
}
LIMIT = 1e-5
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
        ]
        return model, samples, *of_transformers(model, samples)

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_are_those_of_transformers(made, layout):
    name, num_ranks, settings = LAYOUTS[layout]
    model, samples, expected, gradients = made(name)
    config = rank_config(
        str(model.folder),
        distributed_timeout_minutes=2,
        multimodal_keys={"image": "images"},
        **settings,
    )
    text = [replace(sample, images=()) for sample in samples]
    seen = run_ranks(
        look_at_images, num_ranks, config, make=model.make, samples=samples, without=text
    )
    scale = max(1.0, expected.abs().max().item())
    for one in seen:
        if one["logits"] is None:  # not on the last stage
            continue
        held = torch.from_numpy(one["held"])
        is_token = held >= 0
        ours = torch.from_numpy(one["logits"])
        assert (ours[is_token] - expected[held[is_token]]).abs().max() < LIMIT * scale
        # the same logits of a model that sees no image would differ
        blind = torch.from_numpy(one["without"])
        is_after = (held >= samples[0].images[0].end) & (held < len(samples[0].token_ids))
        rows = is_after.nonzero()[:, 0]  # of the first sample, in both
        assert (ours[rows] - blind[rows]).abs().max() > 0.01 * scale
    if (
        "use_kl_loss" in settings
    ):  # the reference has the same weights, and must see the same images
        assert abs(seen[0]["metrics"]["train/ref_kl"]) < 1e-6
    found = seen[0]["gradients"]
    assert found.keys() == {name for name in gradients if not name.startswith("model.visual.")}
    for name, theirs in gradients.items():
        if name in found:
            ours = torch.from_numpy(found[name])
            theirs = theirs.mT if theirs.shape != ours.shape else theirs  # stacked experts
            limit = LIMIT * max(1.0, theirs.abs().max().item())
            assert (ours - theirs).abs().max() < limit, name


def test_the_encoder_is_offloaded_with_the_weights_and_is_in_no_checkpoint(made, tmp_path):
    model, samples, *_ = made(DENSE)
    config = rank_config(
        str(model.folder), distributed_timeout_minutes=2, multimodal_keys={"image": "images"}
    )
    (seen,) = run_ranks(
        move_and_resume, 1, config, make=model.make, samples=samples, folder=str(tmp_path / "saved")
    )
    assert seen["held"] == 0
    assert (seen["restored"] == seen["imported"]).all()
    assert (seen["resumed"] == seen["imported"]).all()
    stored = read_metadata(str(tmp_path / "saved")).state_dict_metadata
    assert any("decoder" in key for key in stored)
    assert not any(word in key for key in stored for word in ("visual", "blocks", "merger"))
