"""The critic's part of the training stage: values, GAE, and the critic's optimizer steps.

Input: scored groups, the batches of a rollout in the object store. Output: advantages for the
policy; the critic, on the policy's ranks, is trained towards the returns. Values are computed once,
before any step; values and returns pass through the driver as columns by sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlpost.algorithm.advantage import Penalties
from rlpost.algorithm.gae import Discounts, Estimates, estimate_with_values
from rlpost.algorithm.partition import by_group
from rlpost.columns import FloatColumn
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.driver.batches import DealtStep, by_position, in_order
from rlpost.driver.calls import Calls
from rlpost.driver.worker_groups import (
    Actor,
    ActorGroup,
    StoredBatches,
    StoredValues,
    received,
    remote,
)
from rlpost.types import SampleGroup


@dataclass(frozen=True, slots=True)
class CriticBatches:
    """The steps of a rollout as dealt to the ranks, and their batches in the store."""

    steps: Sequence[DealtStep]
    stored: Sequence[StoredBatches]


class CriticTraining:
    """Trains the critic of one run."""

    def __init__(
        self, grpo: GrpoConfig, actors: ActorGroup, data_ranks: Sequence[int], calls: Calls
    ) -> None:
        """``data_ranks``: the data-parallel rank of each actor."""
        self._grpo, self._actors, self._data_ranks, self._calls = grpo, actors, data_ranks, calls

    async def train(
        self,
        groups: Sequence[SampleGroup],
        batches: CriticBatches,
        penalties: Penalties | None,
    ) -> Estimates:
        """Train the critic on a rollout; return advantages, returns and metrics.

        Raises:
            Preempted: a stop was requested before the first optimizer step; nothing has changed.
        """
        values = await self._values(batches)
        estimates = await self._estimates(groups, batches, values, penalties)
        metrics = await self._train(batches, values, estimates)
        return replace(estimates, metrics={**estimates.metrics, **metrics})

    async def _values(self, batches: CriticBatches) -> list[StoredValues]:
        """Compute the values of every step of the rollout; they stay in the object store."""
        values: list[StoredValues] = []
        for batches_of_step in batches.stored:
            calls = [remote(Actor.compute_values, received(one)) for one in batches_of_step]
            send = partial(self._actors.each_stored, calls)
            values.append(await self._calls.make(calls[0].path, send, may_leave=True))
        return values

    async def _estimates(
        self,
        groups: Sequence[SampleGroup],
        batches: CriticBatches,
        values: Sequence[StoredValues],
        penalties: Penalties | None,
    ) -> Estimates:
        """Return advantages and returns by group and sample."""
        values_by_position: dict[int, FloatColumn] = {}
        for step, stored in zip(batches.steps, values, strict=True):
            values_by_rank = []
            for data_rank in range(len(step.batches)):
                rank_values = await self._actors.fetch_columns(stored, self._data_ranks, data_rank)
                assert rank_values is not None, "the last pipeline stage has computed values"
                values_by_rank.append(rank_values)
            values_by_position |= by_position(step, values_by_rank)
        grpo = self._grpo
        return await asyncio.to_thread(
            estimate_with_values,
            groups,
            by_group(groups, in_order(values_by_position)),
            penalties,
            Discounts(grpo.gamma, grpo.lambd),
            normalize_advantages=grpo.normalize_advantages,
        )

    async def _train(
        self,
        batches: CriticBatches,
        values: Sequence[StoredValues],
        estimates: Estimates,
    ) -> Mapping[str, float]:
        """Run the critic's optimizer steps; return the metrics of the last one."""
        sample_returns = [column for group in estimates.returns for column in group]
        metrics: Mapping[str, float] = {}
        each = zip(batches.steps, batches.stored, values, strict=True)
        for number, (step, rank_values, old) in enumerate(each):
            returns = await self._actors.send(step_returns(step, sample_returns), self._data_ranks)
            calls = [
                remote(Actor.train_critic, received(batch), received(before), received(targets))
                for batch, before, targets in zip(rank_values, old, returns, strict=True)
            ]
            send = partial(self._actors.each, calls)
            # After the first step the critic matches no checkpoint, so a stop must not interrupt.
            results = await self._calls.make(calls[0].path, send, may_leave=number == 0)
            metrics = results[0].metrics
        return metrics


def step_returns(
    step: DealtStep, of_samples: Sequence[FloatColumn]
) -> list[tuple[FloatColumn, ...]]:
    """Return the returns of each data-parallel rank's samples; zeros for padding samples."""
    found = []
    for batch, positions in zip(step.batches, step.positions, strict=True):
        own = []
        for sample, position in zip(batch.samples, positions, strict=True):
            if position is None:
                own.append(FloatColumn.zeros(sample.response_length))
            else:
                own.append(of_samples[position])
        found.append(tuple(own))
    return found
