"""Checkpointing Megatron's optimizers when the inner optimizer is torch's AdamW.

megatron-core 0.16 uses torch's AdamW when neither TransformerEngine nor Apex is installed, and then (1) asserts in
``state_dict`` before the first step, (2) looks for Adam's ``step`` in formats that do not carry it, (3) copies into
leaves that require a gradient, (4) gives all parameters one shared ``step`` tensor, which AdamW then increments once a
parameter. Nothing of Megatron is patched: the state is primed, the moments are loaded in place, and the number of
steps, the same for all parameters, is kept beside them.

This module goes away when TransformerEngine's FusedAdam is the only optimizer, or when upstream's own tests cover the
fallback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def uses_torch_adam(optimizer: MegatronOptimizer) -> bool:
    """Whether the fallback is in use."""
    return any(isinstance(one.optimizer, torch.optim.Adam) for one in _each(optimizer))  # AdamW is a subclass


def prime(optimizer: MegatronOptimizer) -> None:
    """Give every parameter the state of a step that has not happened, as AdamW itself would make it."""
    for one in _each(optimizer):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                if not one.optimizer.state[parameter]:
                    one.optimizer.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter.data),
                        exp_avg_sq=torch.zeros_like(parameter.data),
                    )


def step_of(optimizer: MegatronOptimizer) -> float:
    """How many steps were made; 0 where the optimizer is not torch's."""
    steps = [float(state["step"]) for state in _states(optimizer) if "step" in state]
    return max(steps, default=0.0)


def load(optimizer: MegatronOptimizer, loaded: dict[Any, Any], *, step: float) -> None:
    """Take moments and main weights from what was loaded for a primed optimizer in the format "fully_reshardable"."""
    parts = _each(optimizer)
    for number, one in enumerate(parts):
        part = loaded if len(parts) == 1 else loaded[number]
        if isinstance(one, DistributedOptimizer):
            for state in one.optimizer.state.values():
                state.pop("step")
            with torch.no_grad():
                one.load_parameter_state_from_fully_reshardable(part["param_state"])
        elif isinstance(one, Float16OptimizerWithFloat16Params):
            _load_moments(one, part["optimizer"]["state"], step)
            for mine, saved in zip(one.fp32_from_float16_groups, part["fp32_from_fp16_params"], strict=True):
                for main, value in zip(mine, saved, strict=True):
                    main.data.copy_(value.data)
        else:
            _load_moments(one, part["state"], step)
    for state in _states(optimizer):
        state["step"] = torch.tensor(step)


def _load_moments(one: MegatronOptimizer, loaded: dict[Any, Any], step: float) -> None:
    groups = one.optimizer.state_dict()["param_groups"]
    moments = {key: value for key, value in loaded.items() if key != "common_step"}
    states = {key: value | {"step": torch.tensor(step)} for key, value in moments.items()}
    one.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _each(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of a chain (dense parameters, experts) that have parameters on this rank."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [one for one in chained if one.optimizer is not None]


def _states(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    for one in _each(optimizer):
        yield from one.optimizer.state.values()
