"""Muon in Megatron's optimizers: layouts, torch's own Muon, and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract.actor_ranks import Files, run_ranks, train, train_and_compare
from tests.contract.families import load_folder, make_family
from tests.contract.layouts import LAYOUTS, LIMIT, Comparison, tp
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

MUON = {"optimizer": "muon", "use_distributed_optimizer": False}
BY_NAME = {layout.name: layout for layout in LAYOUTS}


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return Comparison(tmp_path_factory.mktemp("muon"))


@pytest.mark.parametrize("name", ["tp2-sp-pp2-muon", "moe-tp2-sp-ep2-muon"])
def test_muon_trains_at_every_layout_as_in_one_process(compare, name):
    """Weights move by 2e-3 of their size and agree to 1e-5 of it."""
    assert compare(BY_NAME[name]).largest < LIMIT


def test_one_step_equals_that_of_torch_for_each_hugging_face_matrix(tmp_path: Path):
    """Query, key, value, gate and up are compared separately, under their Hugging Face names.

    torch orthogonalises in bfloat16, Muon here in float32.
    """
    make_family(tmp_path, "qwen3")
    settings = rank_config(str(tmp_path), lr=0.01, weight_decay=0.0, clip_grad=0.0, **MUON)
    (found,) = run_ranks(train_and_compare, 1, settings, steps=STEPS[:1], two_passes=False)
    for name, start in load_folder(tmp_path).items():
        weight = start.clone().requires_grad_()
        weight.grad = torch.from_numpy(found["gradients"][name])
        if start.dim() == 2 and ".layers." in name:
            optimizer = torch.optim.Muon([weight], 0.01, 0.0, adjust_lr_fn="match_rms_adamw")
        else:
            optimizer = torch.optim.AdamW([weight], 0.01, weight_decay=0.0)
        optimizer.step()
        theirs = (weight - start).detach()
        ours = torch.from_numpy(found["weights"][name]) - start
        assert (ours - theirs).norm() < 0.1 * theirs.norm(), name


def test_a_run_is_resumed_bit_for_bit(tmp_path: Path):
    """With main weights in float32 beside bfloat16, over two tensor-parallel ranks."""
    make_family(tmp_path / "model", "qwen3")
    settings = rank_config(str(tmp_path / "model"), lr=1e-3, bf16=True, **tp(2), **MUON)
    saved = str(tmp_path / "saved")
    whole = run_ranks(train, 2, settings, steps=STEPS, files=Files(save=saved))
    resumed = run_ranks(train, 2, settings, steps=STEPS, files=Files(load=saved))
    assert resumed[0]["metrics"] == whole[0]["metrics"][2:]
    assert resumed[0]["hash"] == whole[0]["hash"]
