"""Fused SwiGLU, with Megatron's own backward pass, trains like the unfused one.

On a CPU its functions are not compiled, but the arithmetic is that of the kernel that torch.compile
generates from them on CUDA.
"""

from __future__ import annotations

import pytest

from rlpost.config.groups.megatron import MegatronConfig
from tests.contract.actor_ranks import run_ranks, train
from tests.contract.families import make_family
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)


def test_dense_layers_experts_and_a_shared_expert_have_the_same_loss_and_gradients(tmp_path):
    make_family(tmp_path / "model", "glm4.5-moe")
    settings = rank_config(str(tmp_path / "model"), lr=1e-3, distributed_timeout_minutes=2)
    fused = settings.model_copy(update={"megatron": MegatronConfig(bias_activation_fusion=True)})
    (ours,), (theirs,) = (run_ranks(train, 1, each, steps=STEPS) for each in (fused, settings))
    assert ours["hash"] != theirs["hash"]  # different rounding proves that the option took effect
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
        assert mine["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
