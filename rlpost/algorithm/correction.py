"""Importance correction for the mismatch between engines and trainer. Pure functions.

The engines sampled the tokens that the trainer computes the loss of.

Input: log-probs of the sampled tokens under the trainer's weights of the rollout (old) and as the
engines reported them (rollout). Output: a weight per token without gradient, and statistics. The
denominators of the loss still count all tokens: a dropped token only lowers the sum. The caller
provides sums over a sample, because its tokens may be on several context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlpost.algorithm.kl import estimate_kl
from rlpost.algorithm.loss import MAX_LOG_RATIO

SampleSums = Callable[[Tensor], Tensor]
"""From one number a token [T] to their sum over the loss-masked tokens of each token's sample [T].
"""


def log_ratio_at(
    level: str, log_ratio_T: Tensor, sample_sums: SampleSums, sample_lengths: Tensor
) -> Tensor:
    """Return log(p_trainer / p_rollout) of each token at a level; [T] -> [T].

    ``token``: of the token. ``sequence``: of the sample, the product over its tokens.
    ``geometric``: the geometric mean over the sample's tokens.

    Raises:
        KeyError: the level is unknown.
    """
    return {
        "token": lambda: log_ratio_T,
        "sequence": lambda: sample_sums(log_ratio_T),
        "geometric": lambda: sample_sums(log_ratio_T) / sample_lengths.clamp(min=1),
    }[level]()


def correction_weights(
    log_ratio_T: Tensor, *, mode: str, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute weights w(r) of the tokens' losses from r = exp(log-ratio).

    ``truncate``: r clamped to [low, high] (truncated importance sampling, Yao et al., "Your
    efficient RL framework secretly brings you off-policy RL training", 2025). ``mask``: r within
    the bounds, 0 outside (at token level IcePop, arXiv 2510.18855; at sequence level masked
    importance sampling). ``reject``: 1 within the bounds, 0 outside: the ratio selects tokens
    without weighting them.

    Returns:
        The weights [T], and the statistics ``tis_weight`` and ``tis_clip_frac``, [T] each.

    Raises:
        KeyError: the mode is unknown.
    """
    ratio = log_ratio_T.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (ratio < low) | (ratio > high)
    weight = {
        "truncate": lambda: ratio.clamp(low, high),
        "mask": lambda: ratio.masked_fill(outside, 0.0),
        "reject": lambda: (~outside).float(),
    }[mode]()
    return weight, {"tis_weight": weight, "tis_clip_frac": outside.float()}


def sequence_mask(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    *,
    delta: float,
    sample_sums: SampleSums,
    sample_lengths: Tensor,
) -> Tensor:
    """Return 0 for tokens of answers that have become unlikely and are discouraged, 1 for others.

    An answer is unlikely when its KL estimate, the mean of -log_ratio over its loss-masked tokens,
    exceeds ``delta``; its tokens with a negative advantage get 0. Source: DeepSeek-V3.2 (2025),
    section 3.1, off-policy sequence masking.

    Args: [T] each; ``log_ratio_T`` is log(p / p_old).
    """
    divergence_T = sample_sums(-log_ratio_T.detach()) / sample_lengths.clamp(min=1)
    return 1.0 - ((advantages_T < 0) & (divergence_T > delta)).float()


def mismatch(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor) -> dict[str, Tensor]:
    """Measure the mismatch between trainer and engines per token.

    Returns: [T] each: ``rollout_logprob_abs_diff``; ``rollout_ratio`` = p_trainer / p_rollout,
        whose expectation is 1, and ``rollout_ratio_max``; ``rollout_kl`` and ``rollout_k3``, two
        estimates of KL(rollout || trainer) at tokens that the engines sampled (``estimate_kl``, k1
        and k3).
    """
    old = old_logprobs_T.detach()
    ratio = (old - rollout_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "rollout_logprob_abs_diff": (old - rollout_logprobs_T).abs(),
        "rollout_ratio": ratio,
        "rollout_ratio_max": ratio,
        "rollout_kl": estimate_kl(rollout_logprobs_T, old, "k1"),
        "rollout_k3": estimate_kl(rollout_logprobs_T, old, "k3"),
    }
