"""The state of a float32 weight in TransformerEngine's Adam, which this machine does not have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlpost.trainer.torch_dist.optimizer_state import KEYS, _sharded_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_main_weight_of_a_float32_weight_is_the_weight_itself(dtype):
    """The Adam makes a main weight of it, which it never updates."""
    weight = torch.nn.Parameter(torch.arange(6, dtype=dtype))
    stale, stored = {key: torch.zeros(3) for key in KEYS}, {}
    optimizer = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"params": [weight.detach()[2:5]]}]),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
        model_param_group_index_map={weight: (0, 0)},
        _get_main_param_and_optimizer_states=lambda _: dict(stale),
        _set_main_param_and_optimizer_states=lambda _, changed: stored.update(changed),
    )
    state = _sharded_state(optimizer, weight, 2, 5)
    is_float32 = dtype == torch.float32
    assert state.store is not None
    assert state.tensors()["param"].tolist() == ([2, 3, 4] if is_float32 else [0, 0, 0])
    state.store({key: torch.full((3,), 7.0) for key in KEYS})
    assert stored["param"].tolist() == [7, 7, 7]
    assert weight.tolist() == [0, 1, *([7, 7, 7] if is_float32 else [2, 3, 4]), 5]
