"""The teacher's part of training on a rollout: divergences of its tokens, and advantages with them.

Input: the batches of a rollout with log-probs of the policy and the teacher, or samples that a
server has scored. Output: the divergence at each response token, by the position of its sample in
the rollout; advantages that include it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlpost.algorithm.advantage import Advantage, Penalties
from rlpost.algorithm.distillation import distances, distilled, whitened_tokens
from rlpost.columns import DoubleColumn, FloatColumn
from rlpost.config.groups.distillation import DistillationConfig
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.tree import Config
from rlpost.errors import DataError
from rlpost.orchestration.batches import DealtStep, rollout_advantages
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


def rank_distances(
    samples: Sequence[TrainSample], policy: Logprobs | None, teacher: Logprobs | None
) -> list[DoubleColumn]:
    """Return the divergence at each response token of a rank's samples, in order.

    Args:
        samples: of the rank.
        policy: None for the log-probs that the engines reported (--use-rollout-logprobs).
        teacher: None for those that a server gave.

    Raises:
        DataError: a sample has no log-probs of the teacher, or one is not finite.
    """
    own = (sample.rollout_logprobs for sample in samples) if policy is None else policy
    theirs = (_of_server(sample) for sample in samples) if teacher is None else teacher
    return [
        distances(student, scored, sample.loss_mask)
        for student, scored, sample in zip(own, theirs, samples, strict=True)
    ]


def by_position(
    step: DealtStep, of_ranks: Sequence[Sequence[DoubleColumn]]
) -> dict[int, DoubleColumn]:
    """Return the divergences of a step by the position of the sample in the rollout."""
    found: dict[int, DoubleColumn] = {}
    for positions, columns in zip(step.positions, of_ranks, strict=True):
        pairs = zip(positions, columns, strict=True)
        found |= {position: column for position, column in pairs if position is not None}
    return found


def advantages_of(
    groups: Sequence[SampleGroup],
    grpo: GrpoConfig,
    given: DistillationConfig,
    penalties: Penalties | None,
    of_position: Mapping[int, DoubleColumn] | None,
) -> list[tuple[Advantage, ...]]:
    """Return the advantages of a rollout by group and sample, with the teacher's part.

    The divergence is subtracted after the estimator, its own whitening included;
    --normalize-advantages whitens what results, as in slime.

    Args:
        groups: of the rollout.
        grpo: settings of the estimator.
        given: settings of distillation.
        penalties: of the KL divergence from the reference, by group and sample.
        of_position: divergences from the teacher by position; None if advantages have no part of
            the teacher.
    """
    if given.opd_alone and given.use_opd:
        base: list[tuple[Advantage, ...]] = [(0.0,) * len(group.samples) for group in groups]
    elif of_position is None:
        base = rollout_advantages(groups, grpo, penalties)
    else:
        plain = grpo.model_copy(update={"normalize_advantages": False})
        base = rollout_advantages(groups, plain, penalties)
    if of_position is None:
        return base
    in_order = iter([of_position[position] for position in range(len(of_position))])
    by_group = [[next(in_order) for _ in group.samples] for group in groups]
    found = distilled(base, by_group, given.opd_kl_coef)
    if not grpo.normalize_advantages:
        return found
    masks = [[scored.sample.mask for scored in group.samples] for group in groups]
    return whitened_tokens(found, masks)


def reverse_kl(of_position: Mapping[int, DoubleColumn], num_tokens: int) -> dict[str, float]:
    """Return the metric: the mean divergence over the trained tokens of the rollout, in nats."""
    return {REVERSE_KL: sum(map(sum, of_position.values())) / max(num_tokens, 1)}


def _of_server(sample: TrainSample) -> FloatColumn:
    if sample.teacher_logprobs is None:
        raise DataError("a sample has no log-probs of the teacher; generate it with --use-opd")
    return sample.teacher_logprobs
