"""What ranks with a critic do for test_critic.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlpost.columns import FloatColumn
from rlpost.types import TrainBatch, TrainSample
from tests.contract.actor_ranks import my_batch, whole_tensors


class Of:
    """The critic of an actor, with the attributes that ``whole_tensors`` reads."""

    def __init__(self, actor: Any) -> None:
        self.inventory, self.model = actor.critic.inventory, actor.critic.model


def returns_of(sample: TrainSample) -> FloatColumn:
    """Some number for each response token, the same wherever the sample is."""
    return FloatColumn(
        [math.sin(0.7 * token + place) for place, token in enumerate(sample.token_ids)][
            sample.prompt_length :
        ]
    )


def by_sample(batch: TrainBatch, values: Any) -> dict[tuple[int, ...], list[float]]:
    """Values by the tokens of the sample; empty on all pipeline stages but the last."""
    flat = [column for micro in values for column in micro]
    return {
        tuple(sample.token_ids): list(column)
        for sample, column in zip(batch.samples, flat, strict=bool(flat))
    }


def train_critic(
    actor: Any,
    steps: Sequence[Sequence[TrainSample]],
    *,
    load: str | None = None,
    save: str | None = None,
    export: str | None = None,
) -> dict[str, Any]:
    """Train policy and critic on the steps that are left, the critic twice a step against the same
    old values; save after the second.
    """
    first = 0
    if load is None:
        actor.import_weights()
    else:
        first = actor.load(load)
    seen: dict[str, Any] = {"metrics": [], "policy": [], "values": [], "gradients": {}}
    real_step = actor.critic.optimizer.step

    def step() -> Any:
        if not seen["gradients"]:
            seen["gradients"].update(whole_tensors(Of(actor), gradients=True))
        return real_step()

    actor.critic.optimizer.step = step
    for number, samples in enumerate(steps[first:], start=first + 1):
        batch = my_batch(actor, samples, 64)
        values = actor.compute_values(batch)
        seen["values"].append(by_sample(batch, values))
        returns = [returns_of(sample) for sample in batch.samples]
        for _ in range(2):
            seen["metrics"].append(dict(actor.train_critic(batch, values, returns).metrics))
        seen["policy"].append(dict(actor.train_step(batch).metrics))
        if number == 2 and save is not None:
            actor.save(save, number)
    if export is not None:
        actor.export(export)
        actor.export_critic(f"{export}/critic")
    return seen | {
        "weights": whole_tensors(Of(actor), gradients=False),
        "hash": actor.critic.weights_hash(max_bytes=10_000),
        "policy_hash": actor.weights_hash(),
        "num_steps": actor.num_critic_steps,
        "num_parameters": sum(
            parameter.numel() for chunk in actor.critic.chunks for parameter in chunk.parameters()
        ),
    }


def leave_and_come_back(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> list[tuple[str, str]]:
    """Hashes of critic and policy after two steps, and of what is saved in the background while
    everything leaves the device and comes back.
    """
    train_critic(actor, steps[:1])
    before = (actor.critic.weights_hash(max_bytes=10_000), actor.weights_hash())
    actor.save(folder, 1, in_background=True)
    assert actor.memory.offload("weights", "grads", "optimizer")["optimizer"]
    actor.finish_save()
    actor.memory.restore("weights", "grads", "optimizer")
    back = (actor.critic.weights_hash(max_bytes=10_000), actor.weights_hash())
    actor.load(folder)
    loaded = (actor.critic.weights_hash(max_bytes=10_000), actor.weights_hash())
    return [before, back, loaded]


def values_of(actor: Any, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Values under the initial weights, and their hash."""
    actor.import_weights()
    batch = my_batch(actor, samples, 64)
    return {
        "values": by_sample(batch, actor.compute_values(batch)),
        "hash": actor.critic.weights_hash(max_bytes=10_000),
    }
