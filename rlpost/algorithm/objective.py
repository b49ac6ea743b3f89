"""The objective: the loss of each token, combined from its terms, without aggregation.

Input: ``Tokens`` of a micro-batch, and settings. Output: loss and statistics per token. The caller
weights both with denominators of the global batch, so that neither depends on the layout. A
statistic whose name ends in ``_max`` is reported as its maximum, every other as its mean over
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from rlpost.algorithm.correction import (
    SampleSums,
    correction_weights,
    log_ratio_at,
    mismatch,
    sequence_mask,
)
from rlpost.algorithm.distillation import distillation_loss, top_k_divergence
from rlpost.algorithm.kl import estimate_kl, unbiased_kl
from rlpost.algorithm.loss import cispo_loss, policy_loss, sequence_level
from rlpost.algorithm.loss_settings import LossSettings
from rlpost.algorithm.plugin import blaming, load_function
from rlpost.errors import ConfigError

Stats = dict[str, Tensor]
RESERVED = frozenset({"loss", "grad_norm", "lr"})
"""Metrics train/NAME of every step, which no statistic may replace."""
_NAME = re.compile(r"[A-Za-z0-9_./@-]{1,100}")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Response tokens of a micro-batch on this rank: float tensors [T].

    Log-probs, entropies and advantages are 0 where ``loss_mask`` is 0. With context parallelism a
    rank holds only some tokens of a sample; ``sample_sums`` sums over all of them.
    """

    logprobs: Tensor  # under the current weights, with gradient
    entropy: Tensor  # of the distribution each token was drawn from, in nats, with gradient
    old_logprobs: Tensor  # under the weights of the rollout
    rollout_logprobs: Tensor  # as the engines reported them
    ref_logprobs: Tensor | None  # under the reference weights
    advantages: Tensor
    loss_mask: Tensor  # 0 or 1
    sample_lengths: Tensor  # loss-masked tokens of the token's sample
    sample_sums: SampleSums  # value per token -> sum over the loss-masked tokens of its sample
    teacher_logprobs: Tensor | None = None  # under a teacher; only with --opd-form loss
    # [T, k], with --opd-top-k: the teacher's most likely tokens under the current weights, with
    # gradient, and under the teacher
    top_logprobs: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None


LossFunction = Callable[[Tokens, LossSettings], tuple[Tensor, Stats]]
"""Returns the loss and the statistics of each token: [T] each."""


def loss_function(settings: LossSettings) -> LossFunction:
    """The loss of ``--loss-type``.

    Raises:
        ConfigError: the path of a custom loss is missing or cannot be imported.
    """
    if settings.loss_type == "custom_loss":
        key, path = "custom_loss_function_path", settings.custom_loss_function_path or ""
        custom = _with_checked_statistics(load_function(path, key=key), f"{key} = {path}")
        return cast(LossFunction, blaming(custom, path, key=key))
    return LOSSES[settings.loss_type]


def _with_checked_statistics(function: LossFunction, named: str) -> LossFunction:
    """Return a custom loss that raises ConfigError for statistics that no metric can be."""

    def checked(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Stats]:
        loss_T, stats = function(tokens, settings)
        if why := statistics_problem({name: _shape(one) for name, one in stats.items()}, loss_T):
            raise ConfigError(f"{named}: {why}")
        return loss_T, stats

    return checked


def statistics_problem(shapes: Mapping[object, object], loss_T: Tensor) -> str:
    """Return why the statistics of a custom loss cannot be metrics; empty if they can.

    ``shapes``: of each statistic, by its name; None for what is no tensor.
    """
    plain = {name: name for name in RESERVED}
    for name, shape in shapes.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"the statistic {name!r:.60} needs a name of letters, digits, _ . / @ and -"
        if shape != loss_T.shape:
            return f"the statistic {name!r} needs a tensor with one number per token, as the loss"
        other = plain.setdefault(re.sub(r"\W", "_", name), name)
        if other != name:
            return f"the statistics {other!r} and {name!r} become one metric; rename one"
        if name in RESERVED:
            return f"train/{name} is a metric of the trainer; rename the statistic"
    return ""


def _shape(value: object) -> object:
    return getattr(value, "shape", None)


def policy_objective(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Stats]:
    """Policy loss x correction + kl_loss_coef KL + opd_kl_coef distillation - entropy_coef entropy,
    each [T].
    """
    mismatch_metrics = mismatch(tokens.old_logprobs, tokens.rollout_logprobs)
    if settings.use_rollout_logprobs:
        tokens = replace(tokens, old_logprobs=tokens.rollout_logprobs)
    loss_T, stats = POLICY_LOSSES[settings.policy_loss](tokens, settings)
    stats = stats | mismatch_metrics | {"entropy": tokens.entropy}
    if settings.use_opsm:
        kept_T = sequence_mask(
            tokens.logprobs - tokens.old_logprobs,
            tokens.advantages,
            delta=settings.opsm_delta,
            sample_sums=tokens.sample_sums,
            sample_lengths=tokens.sample_lengths,
        )
        loss_T, stats = loss_T * kept_T, stats | {"opsm_masked_frac": 1.0 - kept_T}
    if settings.use_tis:
        log_ratio = (tokens.old_logprobs - tokens.rollout_logprobs).detach()
        log_ratio = log_ratio_at(
            settings.tis_level, log_ratio, tokens.sample_sums, tokens.sample_lengths
        )
        weight, tis = correction_weights(
            log_ratio, mode=settings.tis_mode, low=settings.tis_clip_low, high=settings.tis_clip
        )
        loss_T, stats = loss_T * weight, stats | tis
    stats["pg_loss"] = loss_T
    if tokens.ref_logprobs is not None:
        kl_T = _reference_kl(tokens, tokens.ref_logprobs, settings)
        loss_T, stats = loss_T + settings.kl_loss_coef * kl_T, stats | {"ref_kl": kl_T}
    if tokens.teacher_logprobs is not None:
        loss_T = loss_T + settings.opd_kl_coef * distillation_loss(
            tokens.logprobs, tokens.teacher_logprobs
        )
        stats["opd_reverse_kl"] = tokens.logprobs - tokens.teacher_logprobs
    if tokens.top_logprobs is not None and tokens.teacher_top_logprobs is not None:
        kl_T = top_k_divergence(tokens.top_logprobs, tokens.teacher_top_logprobs)
        loss_T, stats = loss_T + settings.opd_kl_coef * kl_T, stats | {"opd_reverse_kl": kl_T}
    if settings.entropy_coef:
        loss_T = loss_T - settings.entropy_coef * tokens.entropy
    return loss_T, {name: value.detach() for name, value in stats.items()}


def _reference_kl(tokens: Tokens, ref_logprobs: Tensor, settings: LossSettings) -> Tensor:
    if settings.use_unbiased_kl:
        kind, old = settings.kl_loss_type, tokens.old_logprobs
        return unbiased_kl(tokens.logprobs, ref_logprobs, old, kind)
    return estimate_kl(tokens.logprobs, ref_logprobs, settings.kl_loss_type)


def sft_objective(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Stats]:
    """Negative log-likelihood of the responses, [T]."""
    del settings
    return -tokens.logprobs, {"entropy": tokens.entropy.detach()}


def ppo_surrogate(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Stats]:
    """Clipped ratios of tokens, [T] (``policy_loss``), with the dual clip of ``eps_clip_c``."""
    return policy_loss(
        tokens.logprobs,
        tokens.old_logprobs.detach(),
        tokens.advantages,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        eps_clip_c=settings.eps_clip_c,
    )


def gspo_surrogate(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Stats]:
    """Clipped ratios of whole sequences, [T] (``sequence_level``), with the same dual clip."""
    old = tokens.old_logprobs.detach()
    means = tokens.sample_sums(tokens.logprobs.detach() - old) / tokens.sample_lengths.clamp(min=1)
    of_sequence = replace(
        tokens,
        logprobs=sequence_level(tokens.logprobs, means),
        old_logprobs=old.new_zeros(old.shape),
    )
    return ppo_surrogate(of_sequence, settings)


def cispo_surrogate(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Stats]:
    """REINFORCE with clipped importance weights, [T] (``cispo_loss``)."""
    return cispo_loss(
        tokens.logprobs,
        tokens.old_logprobs.detach(),
        tokens.advantages,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
    )


POLICY_LOSSES: dict[str, LossFunction] = {
    "ppo": ppo_surrogate,
    "gspo": gspo_surrogate,
    "cispo": cispo_surrogate,
}
"""By the value of --policy-loss."""
LOSSES: dict[str, LossFunction] = {"policy_loss": policy_objective, "sft_loss": sft_objective}
"""By the value of --loss-type, except custom_loss."""
