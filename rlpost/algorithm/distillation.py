"""On-policy distillation: the reverse KL divergence from a teacher, token by token. Pure.

Input: log-probs of the tokens that the student generated, under the student and under the teacher.
Output: the divergence at each token, and advantages that include it.

At a prefix h the divergence is KL(student || teacher) = E[log p(a|h) - log q(a|h)], a ~ p(.|h).
The difference at the token that was generated is its unbiased estimate. Sources: MiniLLM, arXiv
2306.08543, equation 1; GKD, arXiv 2306.13649, equation 3 with on-policy data; the form per token as
an advantage: Thinking Machines Lab, "On-Policy Distillation" (2025), and slime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlpost.algorithm.advantage import Advantage
from rlpost.columns import DoubleColumn, FloatColumn, RunColumn
from rlpost.errors import DataError

if TYPE_CHECKING:  # the driver needs numbers only
    from torch import Tensor

LEAST_REST = 1e-6
"""Least probability of all other tokens that float32 sums over the given ones can resolve."""
Distances = Sequence[Sequence[Sequence[float]]]
"""log p - log q of each response token, by group and sample; 0 where the loss mask is 0."""


def distances(student: FloatColumn, teacher: FloatColumn, mask: RunColumn) -> DoubleColumn:
    """Return log p - log q of each response token of a sample, 0 where the mask is 0; in nats.

    Raises:
        DataError: a log-prob of a trained token is not finite, or the lengths differ.
    """
    if not len(student) == len(teacher) == len(mask):
        raise DataError(
            f"a response of {len(mask)} tokens has {len(student)} log-probs of the policy and "
            f"{len(teacher)} of the teacher"
        )
    difference = student.array.astype("float64") - teacher.array.astype("float64")
    log_ratios = np.where(mask.array != 0, difference, 0.0)
    if not np.isfinite(log_ratios).all():
        raise DataError(
            "the log-prob of a token under the policy or the teacher is not finite; check that the "
            "teacher has the vocabulary of --hf-checkpoint"
        )
    return DoubleColumn.view(log_ratios)


def distilled(
    advantages: Sequence[Sequence[Advantage]], distances: Distances, coef: float
) -> list[tuple[Advantage, ...]]:
    """A_t - coef (log p_t - log q_t), by group and sample: one advantage per response token."""
    found: list[tuple[Advantage, ...]] = []
    for of_group, own in zip(advantages, distances, strict=True):
        pairs = zip(of_group, own, strict=True)
        found.append(tuple(_distilled(advantage, distance, coef) for advantage, distance in pairs))
    return found


def _distilled(advantage: Advantage, distance: Sequence[float], coef: float) -> FloatColumn:
    base = advantage.array if isinstance(advantage, FloatColumn) else advantage
    return FloatColumn((base - coef * np.asarray(distance, dtype="float64")).tolist())


def distillation_loss(logprobs_T: Tensor, teacher_logprobs_T: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 at tokens that the student generated: [T], [T] -> [T].

    Its gradient (log p - log q) grad log p has the expectation grad KL(student || teacher), because
    E[grad log p] = 0; that of log p - log q itself has the expectation 0. Exact where the current
    policy generated the token, that is in the first optimizer step of a rollout. Source: Schulman,
    "Approximating KL divergence" (2020), estimator k2.
    """
    return (logprobs_T - teacher_logprobs_T.detach()).square() / 2


def top_k_divergence(logprobs_TK: Tensor, teacher_logprobs_TK: Tensor) -> Tensor:
    """Reverse KL divergence over k given tokens and all others together: [T, k], [T, k] -> [T].

    sum_i p_i (log p_i - log q_i) + p_r (log p_r - log q_r) with p_r = 1 - sum_i p_i, and q_r alike.
    By the log-sum inequality it is at least 0 and at most KL(p || q), which it equals if the tokens
    are the whole vocabulary. The sum over the tokens without the rest has its least value where p
    leaves them (verl, pull request 5041). Source of the rest as one outcome: OpenClaw-RL, pull
    request 4, after SDFT, arXiv 2601.19897. Gradients flow through ``logprobs_TK``.
    """
    teacher_TK = teacher_logprobs_TK.detach()
    p, q = logprobs_TK.exp(), teacher_TK.exp()
    p_rest = (1.0 - p.sum(-1)).clamp(min=LEAST_REST)
    q_rest = (1.0 - q.sum(-1)).clamp(min=LEAST_REST)
    of_tokens = (p * (logprobs_TK - teacher_TK)).sum(-1)
    return of_tokens + p_rest * (p_rest.log() - q_rest.log())
