"""Ranks whose optimizer is Megatron's HybridDeviceOptimizer, on a machine without CUDA.

It moves state between CUDA and the host, and decides by ``Tensor.is_cuda``. Here, while it sorts
its parameters, every tensor says that it is on CUDA but those that were moved to the host;
everything else of it is the real code, with one order of execution instead of streams
(``rlpost.actor.megatron_on_cpu``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlpost.types import TrainSample
from tests.contract.actor_ranks import Files, my_batch


class _OnHost(torch.Tensor):
    """What ``Tensor.cpu`` made, and what is computed from it."""


def pretend() -> None:
    """Make the optimizer usable in this process, which ends soon."""
    from megatron.core import utils
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from packaging.version import Version

    utils._te_version = Version("2.11.0")  # OptimizerConfig compares it with others
    sort = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    real = torch.Tensor.is_cuda, torch.Tensor.cpu

    def sorted_as_on_cuda(self: Any, offload_fraction: float) -> Any:
        torch.Tensor.is_cuda = property(lambda tensor: not isinstance(tensor, _OnHost))  # type: ignore[assignment,misc]
        torch.Tensor.cpu = lambda tensor: tensor.as_subclass(_OnHost)  # type: ignore[method-assign,assignment]
        try:
            return sort(self, offload_fraction)
        finally:
            torch.Tensor.is_cuda, torch.Tensor.cpu = real  # type: ignore[misc,method-assign]

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = sorted_as_on_cuda
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign,assignment]


def train_hybrid(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, files: Files
) -> dict[str, Any]:
    """Train on the steps that are left, saving after the second in the background; what Adam kept,
    and the metrics.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    inner = [
        one.optimizer for one in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    ]
    assert all(isinstance(one, HybridDeviceOptimizer) for one in inner)
    actor.import_weights()
    done = actor.load(files.load) if files.load else 0
    metrics = []
    for number, samples in enumerate(steps[done:], start=done + 1):
        metrics.append(dict(actor.train_step(my_batch(actor, samples, max_tokens=None)).metrics))
        if number == 2 and files.save:
            Path(files.save).mkdir(exist_ok=True)
            actor.save(files.save, number, in_background=True)
    actor.saves.finish()
    digest = hashlib.sha256()
    steps_made = set()
    for one in inner:
        for group in one.param_groups:
            for parameter in group["params"]:
                state = one.state[parameter]
                steps_made.add(float(state["step"]))
                for key in ("master_param", "exp_avg", "exp_avg_sq"):
                    digest.update(state[key].detach().numpy().tobytes())
        digest.update(f"{len(one.cpu_optimizers)} {one.gpu_optimizer is not None}".encode())
    return {
        "adam": digest.hexdigest(),
        "steps": steps_made,
        "hash": actor.weights_hash(),
        "metrics": metrics,
    }
