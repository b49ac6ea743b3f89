"""Compare gradients of the mixtures of experts in float64.

Usage: ``python -m tests.contract.float64 [NAME ...]``

Each family's first training step with TP 2 and sequence parallelism is compared with one process,
in float32 and with every float32 of the computation replaced by float64. A difference that comes
from rounding shrinks by the ratio of the precisions, 1e-9; one that comes from a wrong sum, a
missing reduction or another order of experts stays.

The loss uses the log-probs of the step itself, not earlier ones: those pass through NumPy in
float32.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rlpost.types import TrainSample
from tests.contract.actor_ranks import my_batch, run_ranks, whole_tensors
from tests.contract.families import FAMILIES, WITH_TENSOR_PARALLEL, load_folder, make_family
from tests.contract.samples import STEPS
from tests.settings import rank_config

MIXTURES = tuple(name for name in FAMILIES if name.endswith("-moe"))
TP_SP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
OPTIMIZER = {
    f"{name}_dtype": torch.float64
    for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq")
}
"""Fields of Megatron's ``OptimizerConfig`` whose defaults are evaluated before ``use_float64``."""
LIMIT = 1e-11
"""Far above the rounding of float64 and far below that of float32."""


def use_float64() -> None:
    """Replace float32 by float64 in this process, as a dtype and in ``Tensor.float``."""
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign,assignment]


def widen(folder: Path) -> None:
    """Store a family's weights in float64.

    Ranks in float64 cannot read weights whose dtype is named float32.
    """
    wide = {name: tensor.double() for name, tensor in load_folder(folder).items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})


def gradients_of_a_step(actor: Any, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Return the full gradients by Hugging Face name, as NumPy arrays on rank 0."""
    found: dict[str, Any] = {}

    def take_gradients() -> bool:
        found.update(whole_tensors(actor, gradients=True))
        return False

    actor.import_weights()
    actor.optimizer.prepare_grads = take_gradients
    actor.optimizer.get_grad_norm = lambda: 0.0
    actor.optimizer.step_with_ready_grads = lambda: True  # Adam is skipped: it has no float64
    actor.train_step(my_batch(actor, samples, max_tokens=None))
    return found


def difference(family: str, *, in_float64: bool) -> tuple[float, str]:
    """Return the largest difference of the gradients, and the tensor that has it.

    A difference is relative to the largest value of its tensor.
    """
    with tempfile.TemporaryDirectory() as name:
        make_family(Path(name), family)
        if in_float64:
            widen(Path(name))
        return _difference(family, name, in_float64=in_float64)


def _difference(family: str, folder: str, *, in_float64: bool) -> tuple[float, str]:
    def gradients(num_ranks: int, layout: dict[str, Any]) -> dict[str, np.ndarray]:
        settings = rank_config(
            folder,
            rollout_temperature=0.8,
            use_distributed_optimizer=False,
            distributed_timeout_minutes=2,
            megatron=OPTIMIZER if in_float64 else {},
            **layout,
        )
        before = use_float64 if in_float64 else None
        return run_ranks(gradients_of_a_step, num_ranks, settings, before=before, samples=STEPS[0])[
            0
        ]

    expected = gradients(1, {})
    ours = gradients(2, TP_SP | WITH_TENSOR_PARALLEL.get(family, {}))
    assert ours.keys() == expected.keys()
    dtypes = {one.dtype for one in (*ours.values(), *expected.values())}
    assert dtypes == {np.dtype(np.float64 if in_float64 else np.float32)}
    assert any(one.any() for one in expected.values())
    return max((_relative(ours[name], expected[name]), name) for name in expected)


def _relative(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours - expected).max() / (np.abs(expected).max() or 1.0))


def main(chosen: list[str]) -> int:
    """Print the table; return 1 if a difference in float64 is more than rounding."""
    failed = False
    print("| model | float32 | float64 | tensor that differs most in float32 |\n|---|---|---|---|")
    for family in chosen or MIXTURES:
        single, name = difference(family, in_float64=False)
        double, _ = difference(family, in_float64=True)
        failed |= double >= LIMIT
        print(f"| {family} | {single:.1e} | {double:.1e} | `{name}` |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
