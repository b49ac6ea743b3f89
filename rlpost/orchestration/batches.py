"""From scored groups to what each rank trains on. Pure.

In: the groups of a rollout. Out: for each optimizer step a ``TrainBatch`` for each data-parallel rank, with the
denominators of the global batch; and what there is to say about the groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rlpost.algorithm.advantage import estimate
from rlpost.algorithm.schedule import schedule
from rlpost.config.tree import Config
from rlpost.rollout.evaluate import summarise
from rlpost.types import SampleGroup, TrainBatch, TrainSample

StepBatches = tuple[TrainBatch, ...]  # one for each data-parallel rank


def train_samples(group: SampleGroup, advantages: Sequence[float]) -> list[TrainSample]:
    """The group's answers with their advantages, in order."""
    return [
        TrainSample(
            token_ids=scored.sample.prompt_ids + scored.sample.response_ids,
            prompt_length=len(scored.sample.prompt_ids),
            loss_mask=(1,) * len(scored.sample.response_ids),
            rollout_logprobs=scored.sample.rollout_logprobs,
            advantage=advantage,
        )
        for scored, advantage in zip(group.samples, advantages, strict=True)
    ]


def make_batches(groups: Sequence[SampleGroup], config: Config) -> list[StepBatches]:
    """The batches of each optimizer step of a rollout, in order."""
    advantages = estimate(
        config.grpo.advantage_estimator,
        [group.rewards for group in groups],
        [[len(scored.sample.response_ids) for scored in group.samples] for group in groups],
        normalize_std=not config.grpo.disable_grpo_std_normalization,
    )
    pairs = zip(groups, advantages, strict=True)
    samples = [sample for group, own in pairs for sample in train_samples(group, own)]
    size = len(samples) // config.num_steps_per_rollout
    return [_step_batches(samples[start : start + size], config) for start in range(0, len(samples), size)]


def _step_batches(samples: Sequence[TrainSample], config: Config) -> StepBatches:
    dealt = schedule(
        [len(sample.token_ids) for sample in samples],
        data_parallel_size=config.data_parallel_size,
        max_tokens=config.max_tokens,
        micro_batch_size=config.perf.micro_batch_size,
        multiple_of=config.micro_batch_multiple,
    )
    num_tokens = sum(sum(sample.loss_mask) for sample in samples)
    return tuple(
        TrainBatch(
            micro_batches=tuple(tuple(samples[i] for i in indices) for indices in micro_batches),
            num_samples=len(samples),
            num_tokens=num_tokens,
        )
        for micro_batches in dealt
    )


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Rewards and lengths of a rollout."""
    summary = summarise(groups)
    lengths = [len(scored.sample.response_ids) for group in groups for scored in group.samples]
    return {
        "reward/mean": summary["reward_mean"],
        "reward/std": statistics.pstdev(reward for group in groups for reward in group.rewards),
        "rollout/zero_std_groups": sum(len(set(group.rewards)) == 1 for group in groups),
        "rollout/response_length_mean": summary["response_length_mean"],
        "rollout/response_length_max": max(lengths),
        "rollout/truncated_frac": summary["truncated_frac"],
        "rollout/num_tokens": sum(lengths),
    }
