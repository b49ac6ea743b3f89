"""The training stage: runs the optimizer steps of a rollout on the actors.

Input: scored groups. Output: the metrics of the last optimizer step; guards check every step. With several steps, or a
KL penalty in the reward, the log-probs under the rollout's weights are computed before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlpost.algorithm.guards import Bounds, Guards, check_tokens
from rlpost.algorithm.kl import kl_value
from rlpost.config.tree import Config
from rlpost.orchestration.batches import StepBatches, batch_samples, rollout_samples
from rlpost.orchestration.interruptible import InterruptibleCalls
from rlpost.orchestration.preemption import StopRequest
from rlpost.orchestration.worker_groups import ActorGroup, RankLogprobs
from rlpost.types import SampleGroup, TrainBatch

logger = logging.getLogger(__name__)


class Training:
    """Trains on the groups of one rollout after the other."""

    def __init__(
        self,
        config: Config,
        actors: ActorGroup,
        data_ranks: Sequence[int],
        *,
        stop: StopRequest,
        is_fresh: bool,
        break_even: float,
    ) -> None:
        """Args: ``data_ranks`` is the data-parallel rank of each actor; ``is_fresh``: the weights are those of
        --hf-checkpoint; ``break_even``: see ``batches.model_break_even``."""
        self._config = config
        self._actors = actors
        self._calls = InterruptibleCalls(actors, stop)
        self._data_ranks = data_ranks
        self._break_even = break_even
        bounds = Bounds(**{name: getattr(config.grpo, name) for name in Bounds.__slots__})
        self._guards = Guards(bounds, is_fresh=is_fresh)

    async def train(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """All optimizer steps of a rollout.

        Raises:
            TrainingError: a step's numbers are wrong.
            Preempted: a stop was requested before the first optimizer step was made: nothing has happened.
            HalfTrained: the deadline of a stop came after it; without one that is near, all steps are made.
        """
        config = self._config
        samples = rollout_samples(groups, config.grpo)
        steps = batch_samples(samples, config, break_even=self._break_even)
        self._warn(check_tokens(batches) for batches in steps)
        old: list[Sequence[RankLogprobs | None]] = [[None] * len(self._data_ranks) for _ in steps]
        metrics: dict[str, float] = {}
        if len(steps) > 1 or config.grpo.kl_coef:
            current = [await self._logprobs(batches) for batches in steps]
            old = list(current)
        if config.grpo.kl_coef:
            ref = [await self._ref_logprobs(batches) for batches in steps]
            of_sample = self._penalties(steps, current, ref)
            of_rollout = iter([of_sample[id(sample)] for sample in samples])
            penalties = [[next(of_rollout) for _ in group.samples] for group in groups]
            metrics["train/reward_kl"] = sum(map(sum, of_sample.values())) / config.grpo.kl_coef / num_tokens(steps)
            samples = rollout_samples(groups, config.grpo, penalties)
            steps = batch_samples(samples, config, break_even=self._break_even)
        for number, (batches, old_logprobs) in enumerate(zip(steps, old, strict=True)):
            step = partial(self._actors.train_step, self._of_ranks(batches), old_logprobs)
            results = await self._calls.make(step, what="train_step", may_leave=number == 0)
            metrics |= results[0].metrics
            self._warn(self._guards.after_step(metrics, is_first=number == 0))
        return metrics

    async def _logprobs(self, batches: StepBatches) -> list[RankLogprobs]:
        call = partial(self._actors.compute_logprobs, self._of_ranks(batches))
        return await self._calls.make(call, what="compute_logprobs", may_leave=True)

    async def _ref_logprobs(self, batches: StepBatches) -> list[RankLogprobs]:
        call = partial(self._actors.compute_ref_logprobs, self._of_ranks(batches))
        return await self._calls.make(call, what="compute_ref_logprobs", may_leave=True)

    def _of_ranks(self, batches: StepBatches) -> list[TrainBatch]:
        return [batches[rank] for rank in self._data_ranks]

    def _warn(self, warnings: Any) -> None:
        for warning in warnings:
            if warning is not None:
                logger.warning("%s", warning)

    def _penalties(
        self,
        steps: Sequence[StepBatches],
        old: Sequence[Sequence[RankLogprobs]],
        ref: Sequence[Sequence[RankLogprobs]],
    ) -> dict[int, tuple[float, ...]]:
        """By the identity of a sample kl_coef x KL of each of its response tokens; 0 where the loss mask is 0."""
        grpo = self._config.grpo
        found = {}
        for batches, old_ranks, ref_ranks in zip(steps, old, ref, strict=True):
            for rank, ours, theirs in zip(self._data_ranks, old_ranks, ref_ranks, strict=True):
                samples = [sample for micro in batches[rank].micro_batches for sample in micro]
                for sample, own, reference in zip(samples if ours else (), _flat(ours), _flat(theirs), strict=True):
                    tokens = zip(own, reference, sample.loss_mask, strict=True)
                    kl = [kl_value(a - b, grpo.kl_loss_type) * mask for a, b, mask in tokens]
                    found[id(sample)] = tuple(grpo.kl_coef * value for value in kl)
        return found


def num_tokens(steps: Sequence[StepBatches]) -> int:
    """Loss-masked tokens of all steps."""
    return sum(batches[0].num_tokens for batches in steps)


def _flat(logprobs: RankLogprobs) -> list[tuple[float, ...]]:
    return [sample for micro_batch in logprobs for sample in micro_batch]
