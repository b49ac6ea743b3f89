"""Ranks whose optimizer is Megatron's HybridDeviceOptimizer, on a machine without CUDA.

The optimizer moves state between CUDA and the host, and decides by ``Tensor.is_cuda``. Here, while
it sorts its parameters, every tensor that was not moved to the host claims to be on CUDA. The rest
is the real code, executed in one fixed order instead of on streams
(``rlpost.extensions.on_cpu.megatron``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlpost.types import TrainSample
from tests.contract.actor_ranks import Files, my_batch
from tests.contract.float32_ranks import held


class _OnHost(torch.Tensor):
    """A result of ``Tensor.cpu``, or a tensor computed from one."""


def pretend() -> None:
    """Make the optimizer usable in this short-lived process; nothing is restored."""
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
    """Train the remaining steps and save in the background after the second one.

    Return a digest of Adam's state, its step counts, the hash of the weights, those in float32, and
    the metrics.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    inner = [
        one.optimizer for one in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    ]
    assert all(isinstance(one, HybridDeviceOptimizer) for one in inner)
    on_host = [weight for one in inner for weight in one.cpu_copys_map_gpu_param]
    pieces = {weight.untyped_storage().data_ptr() for weight in on_host}
    assert len(pieces) == len(inner) < len(on_host), "weights share what is pinned"
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
        "float32": held(actor),
        "metrics": metrics,
    }
