"""Functions that ranks with a critic run for test_critic.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlpost.algorithm.gae import Discounts, estimate_with_values
from rlpost.columns import FloatColumn
from rlpost.types import Sample, SampleGroup, ScoredSample, TrainBatch, TrainSample
from tests.contract.actor_ranks import logits, my_batch, whole_tensors


class Of:
    """The critic of an actor, with the attributes that ``whole_tensors`` reads."""

    def __init__(self, actor: Any) -> None:
        self.inventory, self.model = actor.critic.inventory, actor.critic.model


def returns_of(sample: TrainSample) -> FloatColumn:
    """Return made-up returns of the response tokens, which depend on the sample alone."""
    return FloatColumn(
        [math.sin(0.7 * token + place) for place, token in enumerate(sample.token_ids)][
            sample.prompt_length :
        ]
    )


def by_sample(batch: TrainBatch, values: Any) -> dict[tuple[int, ...], list[float]]:
    """Map the tokens of each sample to its values; empty on all pipeline stages but the last."""
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
    """Train policy and critic on the remaining steps; save after the second.

    Each step trains the critic twice against the same old values.
    """
    first = 0
    if load is None:
        actor.import_weights()
    else:
        first = actor.load(load)
    seen: dict[str, Any] = {"metrics": [], "policy": [], "values": [], "gradients": {}}
    prepare_grads = actor.critic.optimizer.prepare_grads

    def take_gradients() -> Any:
        if not seen["gradients"]:
            seen["gradients"].update(whole_tensors(Of(actor), gradients=True))
        return prepare_grads()

    actor.critic.optimizer.prepare_grads = take_gradients
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
        "num_steps": actor.critic.num_optimizer_steps,
        "num_parameters": sum(
            parameter.numel() for chunk in actor.critic.chunks for parameter in chunk.parameters()
        ),
    }


def leave_and_come_back(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> list[tuple[str, str]]:
    """Return hashes of critic and policy before an offload, after it, and from a checkpoint.

    The checkpoint is saved in the background while everything is offloaded and restored. One step
    is trained before.
    """
    train_critic(actor, steps[:1])
    before = (actor.critic.weights_hash(max_bytes=10_000), actor.weights_hash())
    actor.save(folder, 1, in_background=True)
    assert actor.memory.offload("weights", "grads", "optimizer")["optimizer"]
    actor.saves.finish()
    actor.memory.restore("weights", "grads", "optimizer")
    back = (actor.critic.weights_hash(max_bytes=10_000), actor.weights_hash())
    actor.load(folder)
    loaded = (actor.critic.weights_hash(max_bytes=10_000), actor.weights_hash())
    return [before, back, loaded]


def values_of(actor: Any, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Return the values under the initial weights, and the hash of those weights."""
    actor.import_weights()
    batch = my_batch(actor, samples, 64)
    return {
        "values": by_sample(batch, actor.compute_values(batch)),
        "hash": actor.critic.weights_hash(max_bytes=10_000),
    }


PROMPT, ANSWER, BATCH, WANTED = (5, 7, 11), 6, 32, 48
"""Prompt, tokens per answer, answers per rollout; tokens below ``WANTED`` are rewarded."""


def learn(actor: Any, *, num_rollouts: int) -> dict[str, list[float]]:
    """Train with PPO on answers drawn from the policy.

    Returns, by rollout, ``reward``, the share of wanted tokens, and ``error``, the distance between
    the means of values and returns.
    """
    import numpy as np

    source = np.random.default_rng(1)
    actor.import_weights()
    seen: dict[str, list[float]] = {"reward": [], "error": []}
    for _ in range(num_rollouts):
        answers = _drawn(actor, source)
        groups = [_scored_group(number, answer) for number, answer in enumerate(answers)]
        samples = [_train_sample(answer) for answer in answers]
        batch = TrainBatch((tuple(samples),), len(samples), len(samples) * ANSWER)
        values = actor.compute_values(batch)
        found = estimate_with_values(
            groups,
            [[column] for column in values[0]],
            None,
            Discounts(1.0, 0.95),
            normalize_advantages=True,
        )
        actor.train_critic(batch, values, [returns for (returns,) in found.returns])
        actor.train_step(batch, None, [advantage for (advantage,) in found.advantages])
        seen["reward"].append(sum(group.rewards[0] for group in groups) / len(groups))
        metrics = found.metrics
        seen["error"].append(abs(metrics["train/value_mean"] - metrics["train/return_mean"]))
    return seen


def _drawn(actor: Any, source: Any) -> list[list[int]]:
    """Draw the answers token by token, each token with one pass over all answers so far."""
    import numpy as np

    answers: list[list[int]] = [[] for _ in range(BATCH)]
    for length in range(ANSWER):
        # A sample needs a response: append a token, which no earlier row attends to.
        rows = logits(actor, [_train_sample([*answer, 0]) for answer in answers])
        width = len(PROMPT) + length + 1
        # The row before the placeholder predicts it; rows after the last answer are padding.
        last = rows[width - 2 :: width][:BATCH]
        scaled = np.exp(last - last.max(1, keepdims=True))
        cumulative = (scaled / scaled.sum(1, keepdims=True)).cumsum(1)
        drawn = (cumulative < source.random((BATCH, 1))).sum(1)
        for answer, token in zip(answers, drawn, strict=True):
            answer.append(min(int(token), cumulative.shape[1] - 1))
    return answers


def _train_sample(answer: Sequence[int]) -> TrainSample:
    length = len(answer)
    return TrainSample((*PROMPT, *answer), len(PROMPT), (1,) * length, (0.0,) * length, 0.0)


def _scored_group(number: int, answer: Sequence[int]) -> SampleGroup:
    zeros = (0.0,) * len(answer)
    sample = Sample(number, 0, PROMPT, tuple(answer), zeros, "", "length", 0)
    reward = sum(token < WANTED for token in answer) / len(answer)
    return SampleGroup(number, (ScoredSample(sample, reward),))
