"""Per-parameter state of Megatron's optimizers, independent of the optimizer class.

Input: the optimizer of this rank (a chain of one for dense parameters and one for experts). Output:
main weight and moments of every parameter part that this rank holds, as flat tensors; the number of
Adam's steps; plain settings.

| class | when | main weight and moments |
|---|---|---|
| torch's AdamW | no TransformerEngine | float32 tensors in ``state`` |
| TransformerEngine's FusedAdam | with it | the same; with other types behind ``get_unscaled_state``
|
| rlpost's Muon | ``optimizer`` muon | as torch's AdamW; no second moment for matrices |
| HybridDeviceOptimizer | ``optimizer_cpu_offload`` | in the optimizers inside it, on the host |

megatron-core 0.16 looks for torch Adam's ``step`` in formats that lack it, and gives all parameters
one shared ``step`` tensor, which AdamW then increments once per parameter. So the number of steps,
the same for all parameters, is saved once, and each state gets a separate tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Names of the main weight and of both moments in the format."""
MATRICES: Final = "matrices"
"""Key of a parameter group: whether its parameters are updated by Muon, without a second moment."""
PLAIN = (bool, int, float, str, type(None))

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of elements ``start`` to ``end`` of a parameter of the model."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    is_sharded: bool
    """Whether data-parallel ranks hold different elements; otherwise each holds all."""
    tensors: Callable[[], Tensors]
    """Main weight and moments, [end - start] each. Copies where ``store`` is given."""
    store: Callable[[Tensors], None] | None
    """Writes changed tensors back; None where ``tensors`` returns the live ones."""
    keys: tuple[str, ...] = KEYS
    """Names of ``tensors``: Muon has no second moment."""


def inner(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Optimizers of a chain that have parameters on this rank."""
    chained = (
        optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    )
    return [
        one
        for one in chained
        if one.optimizer is not None and not getattr(one, "is_stub_optimizer", False)
    ]


def parameter_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    """The state of every parameter part that this rank holds.

    Call ``prime`` before the first step.
    """
    for one in inner(optimizer):
        if isinstance(one, DistributedOptimizer):
            yield from _sharded(one)
        else:
            yield from _replicated(one)


def _sharded(one: DistributedOptimizer) -> Iterator[ParameterState]:
    for ranges in one.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, found in bucket["param_map"].items():
                    yield _sharded_state(one, parameter, found["param"].start, found["param"].end)


def _sharded_state(
    one: DistributedOptimizer, parameter: torch.nn.Parameter, start: int, end: int
) -> ParameterState:
    is_hybrid = isinstance(one.optimizer, HybridDeviceOptimizer)
    is_scaled = one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and not is_hybrid

    # TransformerEngine's Adam updates a float32 weight, but not the main weight that it makes of it.
    is_main_weight = is_scaled and parameter.dtype == torch.float32
    group, order = one.model_param_group_index_map[parameter]
    weight = one.optimizer.param_groups[group]["params"][order]

    def tensors() -> Tensors:
        states = one._get_main_param_and_optimizer_states(parameter)
        return _flat(states | {"param": weight} if is_main_weight else states)

    def store(changed: Tensors) -> None:
        one._set_main_param_and_optimizer_states(parameter, changed)
        if is_main_weight:
            weight.data.copy_(changed["param"])

    return ParameterState(parameter, start, end, True, tensors, store if is_scaled else None)


def _replicated(one: MegatronOptimizer) -> Iterator[ParameterState]:
    """States of an optimizer that is not distributed.

    Main weights are separate tensors, or the model's weights if those are float32.
    """
    matrices = _matrices(one.optimizer)
    for parameter, main in main_weights(one):
        state, keys = one.optimizer.state, KEYS[:2] if main in matrices else KEYS
        yield ParameterState(
            parameter,
            0,
            parameter.numel(),
            False,
            lambda main=main, state=state, keys=keys: _flat(  # type: ignore[misc]
                {"param": main, **state[main]}, keys
            ),
            None,
            keys,
        )


def _matrices(within: torch.optim.Optimizer) -> set[torch.Tensor]:
    groups = (group for group in within.param_groups if group.get(MATRICES))
    return {parameter for group in groups for parameter in group["params"]}


def uses_muon(optimizer: MegatronOptimizer) -> bool:
    """Return whether matrices are updated by Muon."""
    return any(
        MATRICES in group for one in inner(optimizer) for group in one.optimizer.param_groups
    )


def main_weights(one: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter of an optimizer that is not distributed, with its main weight."""
    if not isinstance(one, Float16OptimizerWithFloat16Params):
        for group in one.optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
        return
    for models, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
        yield from zip(models, mains, strict=True)
    for group in one.fp32_from_fp32_groups:
        yield from ((parameter, parameter) for parameter in group)


def take_model_weights(optimizer: MegatronOptimizer) -> None:
    """Set the main weights to the weights of the model.

    Megatron's ``reload_model_params`` leaves out copies in host memory of float32 weights
    (``update_fp32_param_by_new_param`` of 0.16.1).
    """
    optimizer.reload_model_params()
    for one in inner(optimizer):
        if isinstance(one.optimizer, HybridDeviceOptimizer):
            for weight, main in one.optimizer.gpu_params_map_cpu_copy.items():
                if weight.dtype == torch.float32:
                    main.data.copy_(weight.data)


def give_float32_weights(optimizer: MegatronOptimizer) -> None:
    """Set the float32 weights of the model to the main weights. Data-parallel collective.

    They differ once the optimizer was loaded from a checkpoint in which the weight has 16 bits: each
    rank has the main weights of its shard.
    """
    for state in parameter_states(optimizer):
        if state.parameter.dtype == torch.float32:
            part = state.parameter.detach().view(-1)[state.start : state.end]
            part.copy_(state.tensors()["param"])
    sharded = [one for one in inner(optimizer) if isinstance(one, DistributedOptimizer)]
    for chunk in sharded[0].model_chunks if sharded else ():
        if any(parameter.dtype == torch.float32 for parameter in chunk.parameters()):
            chunk.start_param_sync(force_sync=True)


def _flat(tensors: Tensors, keys: tuple[str, ...] = KEYS) -> Tensors:
    return {key: tensors[key].detach().view(-1) for key in keys}


def is_live(optimizer: MegatronOptimizer) -> bool:
    """Whether all states are stored tensors; otherwise some are computed when read."""
    return all(state.store is None for state in parameter_states(optimizer))


def prime(optimizer: MegatronOptimizer) -> None:
    """Create the state that the first step would create, as the target of a load.

    Moments of TransformerEngine's Adam are uninitialised until they are loaded, as when Megatron
    loads.
    """
    for one in inner(optimizer):
        within = one.optimizer
        if isinstance(within, HybridDeviceOptimizer):
            for part in within.sub_optimizers:
                _prime(part)
            within._sync_sub_optimizers_state_to_hdo()
        elif isinstance(within, torch.optim.Adam):  # AdamW is a subclass
            _prime(within)
        elif not within.state:
            one.load_state_dict(one.state_dict())


def _prime(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if "exp_avg" in state:
                continue
            state["exp_avg"] = torch.zeros_like(parameter.data)
            if not group.get(MATRICES):
                state["exp_avg_sq"] = torch.zeros_like(parameter.data)
            if isinstance(adam, torch.optim.Adam):
                state["step"] = torch.tensor(0.0)


def num_steps(optimizer: MegatronOptimizer) -> float:
    """Number of Adam's completed steps."""
    found = [0.0]
    for adam in _each_adam(optimizer):
        if isinstance(adam, torch.optim.Adam):
            found += [float(state["step"]) for state in adam.state.values() if "step" in state]
        else:  # TransformerEngine's Adam counts per parameter group
            found += [float(group.get("step", 0)) for group in adam.param_groups if group["params"]]
    return max(found)


def set_num_steps(optimizer: MegatronOptimizer, steps: float) -> None:
    """Set the number of Adam's completed steps."""
    for adam in _each_adam(optimizer):
        if isinstance(adam, torch.optim.Adam):
            for state in adam.state.values():
                state["step"] = torch.tensor(steps)
        else:
            for group in adam.param_groups:
                group["step"] = round(steps)


def plain_groups(optimizer: MegatronOptimizer) -> list[dict[str, object]]:
    """Settings of all parameter groups as plain values, for users and other tools.

    HybridDeviceOptimizer stores classes in them, which ``torch.load(weights_only=True)`` rejects.
    """
    plain = []
    for one in inner(optimizer):
        for group in one.optimizer.param_groups:
            plain.append({key: value for key, value in group.items() if _is_plain(value)})
    return plain


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(each, PLAIN) for each in value)
    return isinstance(value, PLAIN)


def _each_adam(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    for one in inner(optimizer):
        is_hybrid = isinstance(one.optimizer, HybridDeviceOptimizer)
        yield from one.optimizer.sub_optimizers if is_hybrid else [one.optimizer]
