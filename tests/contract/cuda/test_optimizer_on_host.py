"""Checkpoints of an optimizer in host memory (``--optimizer-cpu-offload``, CUDA only)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.actor_ranks import Files, run_ranks
from tests.contract.cuda.hybrid_ranks import pretend, train_hybrid
from tests.contract.families import make_family
from tests.contract.float32_ranks import make_published, train_and_hold
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

OFFLOADED = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}  # as with CUDA
CASES: dict[
    str, tuple[str, int, dict[str, Any], dict[str, Any]]
] = {  # model, ranks, settings, Megatron's own
    "sharded": ("qwen3", 2, {}, {"optimizer_offload_fraction": 1.0}),
    "half on the GPU": (
        "qwen3",
        1,
        {},
        {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True},
    ),
    "float32 weights": ("qwen3.5", 2, {}, {"optimizer_offload_fraction": 1.0}),
    "float32 weights, few on the host": (
        "qwen3.5",
        1,
        {},
        {"optimizer_offload_fraction": 0.1, "overlap_cpu_optimizer_d2h_h2d": True},
    ),
    "experts": (
        "glm4.5-moe",
        2,
        {"expert_model_parallel_size": 2},
        {"optimizer_offload_fraction": 1.0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_in_host_memory_resumes_bit_for_bit_from_plain_values(
    tmp_path: Path, case: str
) -> None:
    """Main weights, moments, step counts and the next metrics equal those of an uninterrupted run.

    ``common.pt``, the small file beside the tensors, can be loaded with ``weights_only=True``.
    """
    model, num_ranks, layout, own = CASES[case]
    make_family(tmp_path / "model", model)
    settings = rank_config(
        str(tmp_path / "model"),
        bf16=True,
        lr=1e-5,
        adam_eps=1e-4,
        distributed_timeout_minutes=2,
        megatron=OFFLOADED | own,
        **layout,
    )
    saved = str(tmp_path / "saved")
    run = dict(steps=STEPS, before=pretend)
    whole = run_ranks(train_hybrid, num_ranks, settings, files=Files(save=saved), **run)
    resumed = run_ranks(train_hybrid, num_ranks, settings, files=Files(load=saved), **run)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert theirs["steps"] == {float(len(STEPS))}
        assert ours["metrics"] == theirs["metrics"][2:]
        assert {key: ours[key] for key in ("adam", "steps", "hash")} == {
            key: theirs[key] for key in ("adam", "steps", "hash")
        }
    common = torch.load(f"{saved}/common.pt", weights_only=True)
    assert common["adam_step"] == 2.0
    assert all("params" not in group for group in common["optimizer"]["param_groups"])


@pytest.mark.parametrize("fraction", [0.05, 1.0])
def test_float32_weights_train_as_on_the_device(tmp_path: Path, fraction: float) -> None:
    """On the GPU and on the host: equal but for rounding, which depends on how memory is aligned."""
    make_published(tmp_path / "model", "qwen3.5")
    given = dict(bf16=True, lr=1e-3, adam_eps=1e-4, distributed_timeout_minutes=2)
    plain = rank_config(str(tmp_path / "model"), **given)
    own = OFFLOADED | {"optimizer_offload_fraction": fraction}
    offloaded = rank_config(str(tmp_path / "model"), **given, megatron=own)
    (theirs,) = run_ranks(train_and_hold, 1, plain, steps=STEPS, files=Files(), max_tokens=None)
    (ours,) = run_ranks(train_hybrid, 1, offloaded, steps=STEPS, files=Files(), before=pretend)
    assert ours["float32"].keys() == theirs["after"].keys()
    for name, expected in theirs["after"].items():
        np.testing.assert_allclose(ours["float32"][name], expected, rtol=1e-6, err_msg=name)
        assert np.abs(expected - theirs["before"][name]).max() > 1e-4, "it was trained"
