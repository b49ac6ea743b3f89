"""Parallel layouts of the trainer, one of each kind.

``python -m tests.contract.layouts`` runs all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlpost.config.tree import Config
from tests.contract import float64
from tests.contract.actor_ranks import Files, count_forwards, run_ranks, train
from tests.contract.families import MTP, load_folder, make_family
from tests.contract.layouts import BLOCK, FULL, LAYOUTS, LIMIT, MOE, SELECTIVE, Comparison, Layout
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

KINDS = (
    "pp2-tied",
    "dp2-ddp-overlap",
    "dp2-overlap",
    "recompute-block",
    "cp2-pp2-gspo-kl",
    "tp2-sp-entropy-tis",
    "mtp-tp2-sp-ep2-pp2-recompute",
    "mtp-cp2-pp2-vpp2-overlap",
    "latent-cp2-ep2",
    "gemma-cp2-pp2-uneven",
    "mtp-latent-tp2-sp-ep2",
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    # the second step depends on the state of the optimizer
    return Comparison(tmp_path_factory.mktemp("layouts"), steps=STEPS[:2])


def test_there_are_at_least_twenty_layouts_and_all_differ():
    assert len(LAYOUTS) >= 20
    assert len(
        {
            (one.model, one.num_ranks, str(sorted(one.settings.items())), one.algorithm)
            for one in LAYOUTS
        }
    ) == len(LAYOUTS)


@pytest.mark.parametrize("name", KINDS)
def test_a_layout_trains_as_one_process_does(compare, name):
    """Loss, gradient norm, gradients of the first step and weights after two steps.

    Relative differences, in float32.
    """
    assert compare(BY_NAME[name]).largest < LIMIT


def test_gradients_of_tensor_parallel_ranks_differ_by_rounding_alone():
    """In float32 the gradients of Qwen2-MoE come closest to the limit.

    ``tests.contract.float64`` covers the other families.
    """
    assert float64.difference("qwen2-moe", in_float64=True)[0] < float64.LIMIT


def settings(folder: Path, layout: Layout, **changes) -> Config:
    options = (
        dict(lr=1e-3, adam_eps=1e-4, distributed_timeout_minutes=2) | layout.settings | changes
    )
    options |= {"enable_mtp_training": layout.model == MTP}
    return rank_config(str(folder / layout.model), **options)


CONTINUED = [  # written at, read at
    ("moe-tp2-sp-ep2-pp2", Layout("alone", MOE, 1)),
    ("cp2-pp2-vpp2", BY_NAME["tp2-sp"]),
    ("pp2-tied", BY_NAME["tp2-sp-pp2-tied"]),
    ("moe-ep2-ddp", BY_NAME["moe-ep2-ddp"]),
    ("mtp-tp2-sp-ep2-pp2-recompute", BY_NAME["mtp-cp2-ep2"]),
]


@pytest.mark.parametrize(
    ("written_at", "reader"), CONTINUED, ids=[f"{a}-to-{b.name}" for a, b in CONTINUED]
)
def test_a_checkpoint_resumes_at_another_layout(tmp_path, written_at, reader):
    """The third step from the checkpoint of the second equals that of the uninterrupted run."""
    writer = BY_NAME[written_at]
    make_family(tmp_path / writer.model, writer.model)
    saved = str(tmp_path / "saved")
    files = Files(save=saved, export=str(tmp_path / "whole"))
    whole = run_ranks(train, writer.num_ranks, settings(tmp_path, writer), steps=STEPS, files=files)
    files = Files(load=saved, export=str(tmp_path / "continued"))
    continued = run_ranks(
        train, reader.num_ranks, settings(tmp_path, reader), steps=STEPS, files=files
    )
    assert continued[0]["metrics"] == [pytest.approx(whole[0]["metrics"][2], rel=1e-5, abs=1e-6)]
    ours, theirs = (load_folder(tmp_path / name) for name in ("continued", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6) for name in ours)
    if reader.name == writer.name:
        assert continued[0]["hash"] == whole[0]["hash"]


# Forward calls. Four layers have two norms and two query and key norms each; one norm is final.
RECOMPUTED = [
    ({}, 17, 4),
    (FULL, 33, 8),
    (BLOCK, 21, 5),
    (SELECTIVE, 17, 8),
]


@pytest.mark.parametrize(("recompute", "norms", "attentions"), RECOMPUTED)
def test_recomputation_repeats_the_expected_forward_passes(tmp_path, recompute, norms, attentions):
    make_family(tmp_path, "qwen3")
    (counts,) = run_ranks(
        count_forwards, 1, rank_config(str(tmp_path), **recompute), samples=STEPS[0]
    )
    assert counts == {"norms": norms, "attentions": attentions}


def test_the_kl_from_the_reference_starts_at_zero_and_a_large_coefficient_limits_it(
    tmp_path,
):
    """The weights leave the reference's after a step, and less so with a large coefficient."""
    make_family(tmp_path, "qwen3")
    steps = [STEPS[0]] * 3

    def kl_of(**changes) -> list[float]:
        alone = rank_config(str(tmp_path), lr=1e-3, adam_eps=1e-4, use_kl_loss=True, **changes)
        (found,) = run_ranks(train, 1, alone, steps=steps)
        return [metrics["train/ref_kl"] for metrics in found["metrics"]]

    free, held = kl_of(), kl_of(kl_loss_coef=10.0)
    assert free[0] == held[0] == pytest.approx(0.0, abs=1e-9)
    assert free[2] > free[1] > 0
    assert held[2] < free[2]
