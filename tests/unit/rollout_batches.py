"""The batches of a rollout's optimizer steps, from its groups."""

from collections.abc import Sequence

from rlpost.config.tree import Config
from rlpost.orchestration.batches import StepBatches, batch_samples, rollout_samples
from rlpost.types import SampleGroup


def make_batches(
    groups: Sequence[SampleGroup], config: Config, **options: float
) -> list[StepBatches]:
    return batch_samples(rollout_samples(groups, config.grpo), config, **options)
