"""The teacher's part of training on a rollout: divergences by token, and advantages with them.

Input: samples that a teacher on engines has scored, and log-probs of the policy. Output: the
divergence at each response token, by the position of its sample in the rollout; advantages that
include it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlpost.algorithm.advantage import Advantage, Penalties, whitened
from rlpost.algorithm.distillation import distances, distilled
from rlpost.algorithm.partition import by_group
from rlpost.columns import DoubleColumn, FloatColumn
from rlpost.config.groups.distillation import DistillationConfig
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.tree import Config
from rlpost.driver.batches import in_order, rollout_advantages
from rlpost.errors import DataError
from rlpost.types import SampleGroup, TrainSample

REVERSE_KL = "train/opd_reverse_kl"

Logprobs = Iterable[FloatColumn]
"""Log-probs of the samples of a data-parallel rank, in order."""


def in_advantage(given: DistillationConfig) -> bool:
    """Whether advantages include the divergence."""
    return given.use_opd and given.opd_form == "advantage"


def needs_policy_logprobs(config: Config) -> bool:
    """Whether the trainer's own log-probs are needed before the first optimizer step."""
    return in_advantage(config.distillation) and not config.grpo.use_rollout_logprobs


def rank_distances(samples: Sequence[TrainSample], policy: Logprobs | None) -> list[DoubleColumn]:
    """Return the divergence at each response token of a rank's samples, in order.

    Args:
        policy: None for the log-probs that the engines reported (--use-rollout-logprobs).

    Raises:
        DataError: a sample has no log-probs of the teacher, or one is not finite.
    """
    own = (sample.rollout_logprobs for sample in samples) if policy is None else policy
    return [
        distances(student, _teacher_logprobs(sample), sample.loss_mask)
        for student, sample in zip(own, samples, strict=True)
    ]


def base_advantages(
    groups: Sequence[SampleGroup],
    grpo: GrpoConfig,
    settings: DistillationConfig,
    penalties: Penalties | None,
) -> list[tuple[Advantage, ...]]:
    """Return the advantages of rewards by group and sample, before ``with_teacher``.

    0 with --opd-alone. --normalize-advantages is left to ``with_teacher`` if that follows.

    ``penalties`` are those of the KL divergence from the reference, by group and sample.
    """
    if settings.use_opd and settings.opd_alone:
        return [(0.0,) * len(group.samples) for group in groups]
    if in_advantage(settings):
        grpo = grpo.model_copy(update={"normalize_advantages": False})
    return rollout_advantages(groups, grpo, penalties)


def with_teacher(
    advantages: Sequence[Sequence[Advantage]],
    groups: Sequence[SampleGroup],
    grpo: GrpoConfig,
    settings: DistillationConfig,
    penalties_by_position: Mapping[int, DoubleColumn],
) -> list[tuple[Advantage, ...]]:
    """Subtract the divergence from the advantages of all tokens, by group and sample.

    This follows the estimator, its own whitening included; --normalize-advantages whitens the
    result, as in slime. ``penalties_by_position`` has the divergences by the position of the sample
    in the rollout.
    """
    divergences = by_group(groups, in_order(penalties_by_position))
    combined = distilled(advantages, divergences, settings.opd_kl_coef)
    if not grpo.normalize_advantages:
        return combined
    return whitened(combined, [group.masks for group in groups])


def reverse_kl(by_position: Mapping[int, DoubleColumn], num_tokens: int) -> dict[str, float]:
    """Return the metric: the mean divergence over the trained tokens of the rollout, in nats."""
    return {REVERSE_KL: sum(map(sum, by_position.values())) / max(num_tokens, 1)}


def _teacher_logprobs(sample: TrainSample) -> FloatColumn:
    if sample.teacher_logprobs is None:
        raise DataError("a sample has no log-probs of the teacher; generate it with --use-opd")
    return sample.teacher_logprobs
