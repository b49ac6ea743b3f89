"""The loss of a critic: a pure function of per-token tensors, without aggregation.

Input: 1-D tensors over the response tokens of a micro-batch (suffix T). Output: loss and statistics
per token; the caller weights them as those of a policy loss (``rlpost.algorithm.loss``).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
