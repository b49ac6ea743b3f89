"""Checkpointing the distributed optimizer when its inner optimizer is torch's AdamW.

megatron-core 0.16 uses torch's AdamW when neither TransformerEngine nor Apex is installed, and then (1) asserts in
``state_dict`` before the first step, (2) looks for Adam's ``step`` in formats that do not carry it, (3) copies into
leaves that require a gradient, (4) gives all parameters one shared ``step`` tensor, which AdamW then increments once a
parameter. Nothing of Megatron is patched: ``prime`` and ``load`` take the same calls in an order that avoids all four.

This module goes away when TransformerEngine's FusedAdam is the only optimizer, or when upstream's own tests cover the
fallback.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def uses_torch_adam(optimizer: DistributedOptimizer) -> bool:
    """Whether the fallback is in use."""
    return isinstance(optimizer.optimizer, torch.optim.Adam)  # AdamW is a subclass


def prime(optimizer: DistributedOptimizer) -> None:
    """Give every parameter the state of a step that has not happened, as AdamW itself would make it."""
    inner = optimizer.optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.state[parameter].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(parameter.data),
                    exp_avg_sq=torch.zeros_like(parameter.data),
                )


def load(optimizer: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
    """``optimizer.load_state_dict(state_dict)`` for a primed optimizer and the format "fully_reshardable"."""
    tensors = state_dict["param_state"]
    common = {key: value for key, value in state_dict.items() if not key.startswith("param_state")}
    optimizer.load_state_dict(common)
    states = list(optimizer.optimizer.state.values())
    steps = [float(state.pop("step")) for state in states]
    with torch.no_grad():
        optimizer.load_parameter_state_from_fully_reshardable(tensors)
    for state, step in zip(states, steps, strict=True):
        state["step"] = torch.tensor(step)
