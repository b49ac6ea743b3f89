"""Functions that the ranks of ``actor_ranks`` run for a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpost.config.wording import with_values
from rlpost.types import TrainSample
from tests.contract.actor_ranks import Files, logits, train


def imported_logits(actor: Any, samples: Sequence[TrainSample]) -> Any:
    """Import the weights; return the logits [T, vocabulary]."""
    actor.import_weights()
    return logits(actor, samples)


def logits_and_export(
    actor: Any, samples: Sequence[TrainSample], *, num_steps: int, export: str
) -> dict[str, Any]:
    """Train steps on the same samples and export, adapters as a PEFT folder.

    Returns: logits [T, vocabulary] ``before`` and ``after`` training.
    """
    before = imported_logits(actor, samples)
    if actor.config.lora.lora_rank:
        actor.config = with_values(actor.config, lora_export="peft")
    train(actor, [samples] * num_steps, files=Files(export=export))
    return {"before": before, "after": logits(actor, samples)}
