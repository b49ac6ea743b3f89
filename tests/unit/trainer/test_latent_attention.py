"""Gradients of the key that all heads share, without sequence parallelism."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlpost.trainer import layer_specs
from rlpost.trainer.layer_specs import LatentAttention

MAPPINGS = "megatron.core.tensor_parallel.mappings"
GROUP = SimpleNamespace(size=lambda: 2)


def test_the_gradient_of_the_shared_key_is_summed_over_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ranks have equal values, so a sum is twice the gradient of one of them."""
    monkeypatch.setattr(
        layer_specs,
        "gather_from_tensor_model_parallel_region",
        lambda values, group: torch.cat([values, values], dim=-1),
    )
    # Megatron ignores the given group before torch.distributed is initialised.
    monkeypatch.setattr(f"{MAPPINGS}.get_tensor_model_parallel_group_if_none", lambda _: GROUP)
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: values.mul_(2))
    config = SimpleNamespace(sequence_parallel=False, kv_lora_rank=3, qk_pos_emb_head_dim=3)
    attention = SimpleNamespace(config=config, pg_collection=SimpleNamespace(tp=GROUP))
    sharded = torch.randn(5, 1, 3, requires_grad=True)
    whole, _ = LatentAttention._whole(attention, None, None, (sharded, None))
    narrow, position = whole.split([3, 3], dim=-1)
    (narrow.sum() + 10 * position.sum()).backward()
    assert sharded.grad is not None
    assert sharded.grad.unique().tolist() == [1 + 2 * 10]
