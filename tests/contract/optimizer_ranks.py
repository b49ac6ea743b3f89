"""What a rank of ``actor_ranks.run_ranks`` does to show its optimizer from within."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from rlpost.types import TrainSample
from tests.contract.actor_ranks import Files, my_batch, train


def train_and_look_inside(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, files: Files | None = None
) -> dict[str, Any]:
    """Train on the steps that are left; a hash of all that Adam works on and keeps, the types of it, and whether the
    main weights hold what bfloat16 could not."""
    result = train(actor, steps, files=files or Files())
    tensors = list(_kept_by_adam(actor))
    digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
    types = {str(parameter.dtype) for chunk in actor.model for parameter in chunk.parameters()}
    finer = any(not tensor.equal(tensor.bfloat16().float()) for tensor in tensors[::3])
    kept = {"adam": digest, "adam_types": {str(tensor.dtype) for tensor in tensors}, "finer": finer}
    return result | kept | {"types": types}


def _kept_by_adam(actor: Any) -> Any:
    """Main weights and moments, in order, of each optimizer of a chain."""
    for one in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                state = one.optimizer.state[parameter]
                yield from (state["exp_avg"], state["exp_avg_sq"])


def restart_from_weights(actor: Any, *, folder: str, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Load a checkpoint and make one step from it: what Adam had before and the step's metrics."""
    step = actor.load(folder)
    states = [one.optimizer.state for one in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])]
    return {
        "step": step,
        "num_optimizer_steps": actor.num_optimizer_steps,
        "moments": sum(float(each["exp_avg"].abs().sum()) for state in states for each in state.values() if each),
        "hash": actor.weights_hash(),
        "metrics": dict(actor.train_step(my_batch(actor, samples, 64)).metrics),
    }
