"""Functions that the ranks of ``actor_ranks`` run to show their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpost.config.wording import with_values
from rlpost.types import StepPlace, TrainSample
from tests.contract.actor_ranks import Files, logits, my_batch, train


def train_adapters(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, files: Files | None = None
) -> dict[str, Any]:
    """Train on the remaining steps; return metrics, a hash of the merged weights, and the adapters.

    ``adapters``: full factors by their names in PEFT, as NumPy arrays on the first rank.
    ``trained``: the number of trained elements on this rank.
    """
    trained = train(actor, steps, files=files or Files())
    return trained | {"adapters": whole_adapters(actor), "trained": _num_trained(actor)}


def whole_adapters(actor: Any) -> dict[str, Any]:
    """Return all full factors by name, on rank 0; collective."""
    import torch

    from rlpost.trainer.lora.adapters import peft_settings
    from rlpost.trainer.weights.peft_folder import peft_tensors

    found = peft_tensors(actor.inventory, peft_settings(actor.config))
    if torch.distributed.get_rank() != 0:
        return {}
    return {name: tensor.float().clone().numpy() for name, tensor in found.items()}


def look_at_adapters(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> dict[str, Any]:
    """Return logits of base and adapted model before and after training; export both ways."""
    samples = steps[0]
    seen: dict[str, Any] = {}
    actor.import_weights()
    seen["adapted before"] = logits(actor, samples)
    with actor._adapters.swapped_in():
        seen["base"] = logits(actor, samples)
    batch = my_batch(actor, samples, None)
    seen["base logprobs"] = actor.compute_logprobs(batch)
    trained = train_adapters(actor, steps, files=Files(save=f"{folder}/saved"))
    seen["adapted after"] = logits(actor, samples)
    with actor._adapters.swapped_in():
        seen["base after"] = logits(actor, samples)
    seen["reference logprobs"] = actor.compute_ref_logprobs(batch)
    actor.export(f"{folder}/merged")
    actor.config = with_values(actor.config, lora_export="peft")
    actor.export(f"{folder}/peft")
    seen["num_saved"] = _num_saved(f"{folder}/saved")
    return trained | seen


def _num_trained(actor: Any) -> int:
    return sum(
        parameter.numel()
        for chunk in actor.model
        for parameter in chunk.parameters()
        if parameter.requires_grad
    )


def _num_saved(folder: str) -> dict[str, int]:
    """Count the elements of the weights, and of each optimizer state, in a checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found: dict[str, int] = {}
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    for key, stored in metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            is_state = key.startswith("optimizer.state.")
            kind = key.split(".")[2] if is_state else "weights"
            found[kind] = found.get(kind, 0) + stored.size.numel()
    return found


def versions_of_adapters(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> list[list[list[float]]]:
    """Write the folder that engines load after each step, as ``folder/NUMBER`` from 1.

    Returns: log-probs of the samples of the first step, with the base and after each step.
    """
    samples = steps[0]
    actor.import_weights()
    found = [_logprobs(actor, samples)]
    for number, step in enumerate(steps, start=1):
        place = StepPlace(number, 1, 1, old_version=number - 1)
        actor.train_step(my_batch(actor, step, max_tokens=None), place=place)
        actor.write_engine_folder(f"{folder}/{number}", number)
        found.append(_logprobs(actor, samples))
    return found


def _logprobs(actor: Any, samples: Sequence[TrainSample]) -> list[list[float]]:
    batch = my_batch(actor, samples, max_tokens=None)
    columns = actor.compute_logprobs(batch)
    found = {
        sample.token_ids: list(column)
        for micro, of_micro in zip(batch.micro_batches, columns, strict=True)
        for sample, column in zip(micro, of_micro, strict=True)
    }
    return [found[sample.token_ids] for sample in samples]


def export_both_ways(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> dict[str, Any]:
    """Train, then export the merged weights and the adapters; return the merged tensors."""
    trained = train_adapters(actor, steps)
    actor.export(f"{folder}/merged")
    actor.config = with_values(actor.config, lora_export="peft")
    actor.export(f"{folder}/peft")
    return trained
