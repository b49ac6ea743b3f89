"""A function that ranks run in the tests of routing replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlpost.types import TrainSample
from tests.contract.actor_ranks import micro_batch_multiple, my_batch, whole_tensors


def replay(
    actor: Any, samples: Sequence[TrainSample], *, then: str | None = None
) -> dict[str, Any]:
    """Compute log-probs in groups other than those of training, then train one step.

    Args:
        actor: the actor.
        samples: those of the global batch.
        then: a folder whose weights are imported between the two.
    """
    from rlpost.trainer.weights.importer import HuggingFaceFolder, import_weights

    actor.import_weights()
    gradients: dict[str, Any] = {}
    real_norm = actor.optimizer.get_grad_norm

    def norm() -> Any:  # before the gradients are clipped
        gradients.update(whole_tensors(actor, gradients=True))
        return real_norm()

    actor.optimizer.get_grad_norm = norm
    batch = my_batch(actor, samples, max_tokens=64)
    mine = [sample for micro_batch in batch.micro_batches for sample in micro_batch]
    num_groups = max(len(batch.micro_batches) // 2, micro_batch_multiple(actor.config))
    order = list(range(len(mine)))[::-1]
    groups = [tuple(order[start::num_groups]) for start in range(num_groups)]
    found = actor.compute_logprobs(dataclasses.replace(batch, log_prob_groups=tuple(groups)))
    if then is not None:
        import_weights(actor.inventory, HuggingFaceFolder(then))
        actor.optimizer.reload_model_params()
    metrics = actor.train_step(batch).metrics
    return {
        "samples": [sample.token_ids for sample in mine],
        "logprobs": [list(values) for micro_batch in found for values in micro_batch],
        "metrics": dict(metrics),
        "gradients": gradients,
    }
