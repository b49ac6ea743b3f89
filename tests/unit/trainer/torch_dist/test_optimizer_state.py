"""The state of a float32 weight in TransformerEngine's Adam, which this machine does not have."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rlpost.trainer.torch_dist.optimizer_state import KEYS, _sharded_state


def test_the_main_weight_of_a_float32_weight_is_the_weight_itself():
    """The Adam makes a main weight of it, which it never updates."""
    stale = {key: torch.zeros(3) for key in KEYS}
    stored = {}
    optimizer = SimpleNamespace(
        optimizer=None,
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
        _get_main_param_and_optimizer_states=lambda _: dict(stale),
        _set_main_param_and_optimizer_states=lambda _, changed: stored.update(changed),
    )
    for dtype, expected in ((torch.float32, [2.0, 3.0, 4.0]), (torch.bfloat16, [0.0] * 3)):
        weight = torch.nn.Parameter(torch.arange(6, dtype=dtype))
        state = _sharded_state(optimizer, weight, 2, 5)
        assert state.store is not None
        assert state.tensors()["param"].tolist() == expected
        state.store({key: torch.full((3,), 7.0) for key in KEYS})
        assert stored["param"].tolist() == [7.0] * 3
        is_written = dtype == torch.float32
        assert weight.tolist() == [0, 1, *([7] * 3 if is_written else [2, 3, 4]), 5]
