"""Estimators of KL(policy || reference) at sampled tokens: pure functions of log-probs.

Input: log-probs of the tokens under both. Output: one value per token, differentiable. Source:
Schulman, "Approximating KL divergence" (2020), which names them k1, k2 and k3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

if TYPE_CHECKING:  # the driver needs numbers only
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "low_var_kl"]
LOW_VAR_BOUND = 10.0
MAX_DIFFERENCE = 20.0
"""Bound of a difference, so that exp stays finite.

Otherwise a masked token's gradient would be 0 x infinity.
"""


def estimate_kl(logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: str) -> Tensor:
    """Estimate the divergence at each token: [T], [T] -> [T].

    With d = policy - reference: k1 is d, of either sign. k2 is d^2 / 2. k3 is exp(-d) + d - 1, never
    negative, with d clamped to +-20. low_var_kl is k3 clamped to 10.

    At tokens that the policy sampled, the values of k1 and k3 are unbiased; that of k2 is not. Of
    the gradients, which flow through ``logprobs_T`` alone, that of k2 is the one of the divergence.
    That of k1 is 0 in expectation, whatever the divergence, and that of k3 is the one of the
    divergence in the other direction, KL(reference || policy). ``unbiased_kl`` has the gradient of
    the divergence with every kind.

    Raises:
        ValueError: the kind is unknown.
    """
    difference = logprobs_T - ref_logprobs_T.detach()
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind in ("k3", "low_var_kl"):
        difference = difference.clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
        k3 = (-difference).exp() + difference - 1
        return k3.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else k3
    raise ValueError(f"kl_loss_type={kind!r} is not known; choose {', '.join(get_args(Estimator))}")


def unbiased_kl(
    logprobs_T: Tensor, ref_logprobs_T: Tensor, old_logprobs_T: Tensor, kind: str
) -> Tensor:
    """Estimate the divergence at tokens that ``old`` sampled: [T], [T], [T] -> [T].

    ``estimate_kl`` times p / p_old, through which gradients flow as well, so that its expectation
    and its gradient's are those of the divergence. Source: DeepSeek-V3.2 (2025), equation 7. The
    bound of low_var_kl holds for the product, as in slime's ``compute_approx_kl``
    (``slime/utils/ppo_utils.py``).
    """
    log_ratio = (logprobs_T - old_logprobs_T.detach()).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    is_bounded = kind == "low_var_kl"
    kl = log_ratio.exp() * estimate_kl(logprobs_T, ref_logprobs_T, "k3" if is_bounded else kind)
    return kl.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if is_bounded else kl


def kl_values(difference_T: object, kind: str) -> object:
    """Compute ``estimate_kl`` for float64 arrays [T]: d = policy - reference, clamped to +-20.

    Raises:
        KeyError: the kind is unknown.
    """
    d = np.clip(difference_T, -MAX_DIFFERENCE, MAX_DIFFERENCE)
    return {
        "k1": lambda: d,
        "k2": lambda: d * d / 2,
        "k3": lambda: _k3(d),
        "low_var_kl": lambda: np.minimum(_k3(d), LOW_VAR_BOUND),
    }[kind]()


def _k3(d_T: np.ndarray) -> np.ndarray:
    # numpy's exp differs from the C library's in the last bit, and between processors.
    exp_T = np.fromiter(map(math.exp, (-d_T).tolist()), dtype=np.float64, count=len(d_T))
    return exp_T + d_T - 1
