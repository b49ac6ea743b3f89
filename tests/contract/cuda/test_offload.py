"""Adam in host memory without TransformerEngine: Megatron's HybridDeviceOptimizer on a CPU.

The model's buffers represent the memory of a GPU.
"""

from __future__ import annotations

import pytest
import torch

from rlpost.errors import ConfigError
from tests.contract.actor_ranks import run_ranks, train
from tests.contract.families import make_family
from tests.contract.optimizer_ranks import train_with_adam_in_host_memory
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tells the model from the host by the memory of a CPU"
    ),
]


@pytest.mark.parametrize("family", ["qwen3", "glm4.5-moe"])
def test_it_trains_to_the_same_bits_as_adam_on_the_device(tmp_path, family):
    """The sharded optimizers of two ranks, one of them for experts, keep all state on the host."""
    make_family(tmp_path / "model", family)
    layout = {"expert_model_parallel_size": 2} if "moe" in family else {}
    settings = rank_config(
        str(tmp_path / "model"), bf16=True, lr=1e-3, distributed_timeout_minutes=2, **layout
    )
    plain = run_ranks(train, 2, settings, steps=STEPS)
    offloaded = run_ranks(train_with_adam_in_host_memory, 2, settings, steps=STEPS)
    for ours, theirs in zip(offloaded, plain, strict=True):
        assert ours["num_optimizers"] > 1 and ours["kept_in_model"] == 0
        assert ours["hash"] == theirs["hash"]
        assert ours["metrics"] == theirs["metrics"]


def test_weights_in_float32_are_refused(monkeypatch):
    """HybridDeviceOptimizer of Megatron-core 0.16.1 gets views, which torch's optimizers refuse."""
    from rlpost.trainer.optimizer import optimizer_config

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert optimizer_config(
        rank_config("", optimizer_cpu_offload=True, bf16=None)
    ).optimizer_cpu_offload
    with pytest.raises(
        ConfigError, match=r"--optimizer-cpu-offload true needs weights in bfloat16.*--bf16 true"
    ):
        optimizer_config(rank_config("", optimizer_cpu_offload=True, bf16=False))
