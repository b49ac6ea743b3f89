"""Losses of policy and critic: pure functions of per-token tensors, without aggregation.

Input: 1-D tensors over the response tokens of a micro-batch (suffix T). Output: loss and statistics
per token. The caller multiplies by ``token_weights``, whose denominators count the global batch.
The plain sum over all micro-batches and ranks is then the loss, at every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios, so that exp stays finite."""


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate: max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A).

    r = exp(new - old). Tensors are float, of shape [T]. Gradients flow only through ``logprobs_T``.
    With ``eps_clip_c`` > 1 the loss of a token with A < 0 is at most -eps_clip_c A (dual clip).

    Returns: The loss [T] and, detached, [T] each: ``ppo_kl`` = old - new; ``ratio`` and
        ``ratio_max``; ``clip_frac``, 1 where clipping is active; ``clip_frac_low`` and
        ``clip_frac_high``, 1 where the lower or upper bound is active; and ``dual_clip_frac``.

    Sources: PPO, arXiv 1707.06347, equation 7; a higher upper bound: DAPO, arXiv 2503.14476,
    equation 10; dual clip: arXiv 1912.09729, equation 5.
    """
    log_ratio = (logprobs_T - old_logprobs_T.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -ratio * advantages_T
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages_T
    loss_T = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    is_bounded = torch.zeros_like(is_clipped)
    if eps_clip_c is not None:
        bound = torch.where(advantages_T < 0, -eps_clip_c * advantages_T, torch.inf)
        is_bounded = loss_T > bound
        loss_T = torch.minimum(loss_T, bound)
    return loss_T, _stats(log_ratio, is_clipped, is_bounded)


def cispo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a clipped importance weight without gradient: -sg(clip(r)) A log p.

    Every token keeps its gradient. Arguments and statistics as for ``policy_loss``. Source: CISPO,
    arXiv 2506.13585, equation 4.
    """
    log_ratio = (logprobs_T - old_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return -weight * advantages_T * logprobs_T, _stats(
        log_ratio, weight != ratio, torch.zeros_like(ratio).bool()
    )


def _stats(log_ratio_T: Tensor, is_clipped: Tensor, is_bounded: Tensor) -> dict[str, Tensor]:
    """Statistics per token.

    The lower bound applies where the ratio fell, the upper where it rose.
    """
    log_ratio = log_ratio_T.detach()
    ratio = log_ratio.exp()
    return {
        "ppo_kl": -log_ratio,
        "ratio": ratio,
        "ratio_max": ratio,
        "clip_frac": (is_clipped | is_bounded).float(),
        "clip_frac_low": (is_clipped & (log_ratio < 0)).float(),
        "clip_frac_high": (is_clipped & (log_ratio > 0)).float(),
        "dual_clip_frac": is_bounded.float(),
    }


def sequence_level(logprobs_T: Tensor, mean_log_ratio_T: Tensor) -> Tensor:
    """Return log-ratios with the value of the sequence and the gradient of the token; [T].

    This is GSPO-token. Pass the result to ``policy_loss`` with old log-probs of zero. With one
    advantage per sample the gradient is that of GSPO. Source: GSPO, arXiv 2507.18071, equations 5
    and 13.

    Args:
        logprobs_T: under the current weights.
        mean_log_ratio_T: mean of new - old over the loss-masked tokens of each token's sample.
    """
    return mean_log_ratio_T.detach() + logprobs_T - logprobs_T.detach()


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, value_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error, clipped: max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2.

    Tensors are float, of shape [T]; gradients flow only through ``values_T``. Without
    ``value_clip`` the error is not clipped. The squared error is the second term of PPO's
    objective, arXiv 1707.06347, equation 9; the clip is that of its authors' code
    (openai/baselines, ``ppo2``), and the half as in TRL.

    Returns: The loss [T] and, detached, [T] each: ``value_loss``, and ``value_clip_frac``, 1 where
        the clipped error is the larger one.
    """
    old, target = old_values_T.detach(), returns_T.detach()
    plain = (values_T - target).square()
    loss_T, is_clipped = plain, torch.zeros_like(plain)
    if value_clip is not None:
        near = torch.clamp(values_T, min=old - value_clip, max=old + value_clip)
        clipped = (near - target).square()
        loss_T = torch.maximum(plain, clipped)
        is_clipped = (clipped > plain).float()
    loss_T = 0.5 * loss_T
    return loss_T, {"value_loss": loss_T.detach(), "value_clip_frac": is_clipped}


def token_weights(
    sample_lengths: Tensor, *, num_samples: int, num_tokens: int, per_token: bool
) -> Tensor:
    """Return the weight of each token; the sum of loss x weight over the global batch is the loss.

    Args:
        sample_lengths: [T], integer, number of loss-masked tokens of each token's sample.
        num_samples: of the global batch.
        num_tokens: of the global batch.
        per_token: average over tokens instead of samples.

    Returns: [T] float32: 1 / num_tokens with ``per_token``; else 1 / (length x num_samples), the
        mean over samples of the mean over each sample's tokens.
    """
    if per_token:
        return torch.full_like(sample_lengths, 1.0 / num_tokens, dtype=torch.float32)
    return 1.0 / (sample_lengths.clamp(min=1).float() * num_samples)
