"""Functions that the ranks of ``actor_ranks`` run to show the state of their optimizer."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

from rlpost.config.wording import with_values
from rlpost.types import TrainSample
from tests.contract.actor_ranks import Files, my_batch, train


def train_and_look_inside(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, files: Files | None = None
) -> dict[str, Any]:
    """Train on the remaining steps; also return facts about the state of Adam.

    ``adam``: a hash of the main weights and moments. ``adam_types``: their dtypes. ``finer``:
    whether the main weights hold values that bfloat16 cannot represent. ``types``: dtypes of the
    model.
    """
    result = train(actor, steps, files=files or Files())
    tensors = list(_kept_by_adam(actor))
    digest = hashlib.sha256(
        b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    ).hexdigest()
    types = {str(parameter.dtype) for chunk in actor.model for parameter in chunk.parameters()}
    # every third tensor is a main weight
    finer = any(not tensor.equal(tensor.bfloat16().float()) for tensor in tensors[::3])
    kept = {"adam": digest, "adam_types": {str(tensor.dtype) for tensor in tensors}, "finer": finer}
    return result | kept | {"types": types}


def _kept_by_adam(actor: Any) -> Any:
    """Yield main weights and moments, in order, of each optimizer of a chain."""
    for one in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                state = one.optimizer.state[parameter]
                yield from (state["exp_avg"], state["exp_avg_sq"])


def restart_from_weights(
    actor: Any, *, folder: str, samples: Sequence[TrainSample]
) -> dict[str, Any]:
    """Load a checkpoint and train one step from it.

    Returns Adam's state before the step, as the sum of its moments, and the step's metrics.
    """
    step = actor.load(folder)
    states = [
        one.optimizer.state
        for one in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    ]
    return {
        "step": step,
        "num_optimizer_steps": actor.num_optimizer_steps,
        "moments": sum(
            float(each["exp_avg"].abs().sum())
            for state in states
            for each in state.values()
            if each
        ),
        "hash": actor.weights_hash(),
        "metrics": dict(actor.train_step(my_batch(actor, samples, 64)).metrics),
    }


def train_with_adam_in_host_memory(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, files: Files | None = None
) -> dict[str, Any]:
    """Train with Megatron's HybridDeviceOptimizer, as on CUDA without TransformerEngine.

    It replaces the actor's own optimizer. The model's buffers count as GPU memory, everything else
    as host memory.
    """
    import torch
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from rlpost.trainer import optimizer

    on_gpu = {
        buffer.param_data.untyped_storage().data_ptr()
        for chunk in actor.model
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    }
    torch.Tensor.is_of_the_model = property(
        lambda tensor: tensor.untyped_storage().data_ptr() in on_gpu
    )
    # In this method alone, is_cuda becomes is_of_the_model, and pin_memory, which needs CUDA,
    # becomes contiguous, which has no effect here.
    method = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    method.__code__ = _renamed(
        method.__code__, {"is_cuda": "is_of_the_model", "pin_memory": "contiguous"}
    )
    settings = with_values(
        actor.config, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True
    )
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        config = optimizer.optimizer_config(settings)
    with mock.patch.object(optimizer, "optimizer_config", lambda _: config):
        actor.optimizer = optimizer.build(actor.model, settings)
    result = train(actor, steps, files=files or Files())
    parts = [
        one.optimizer for one in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    ]
    assert all(
        isinstance(part, HybridDeviceOptimizer) and part.gpu_optimizer is None for part in parts
    )
    kept = [tensor for part in parts for state in part.state.values() for tensor in state.values()]
    return result | {
        "num_optimizers": sum(len(part.cpu_optimizers) for part in parts),
        "kept_in_model": sum(tensor.is_of_the_model for tensor in kept),
    }


def _renamed(code: types.CodeType, names: dict[str, str]) -> types.CodeType:
    """Return the code, and the code nested in it, with attributes renamed."""
    inner = tuple(
        _renamed(each, names) if isinstance(each, types.CodeType) else each
        for each in code.co_consts
    )
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=inner
    )
