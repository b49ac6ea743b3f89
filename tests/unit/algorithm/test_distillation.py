"""The divergence from a teacher compared with a plain loop, enumeration and autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlpost.algorithm.advantage import whiten, whitened
from rlpost.algorithm.distillation import (
    distances,
    distillation_loss,
    distilled,
    top_k_divergence,
)
from rlpost.algorithm.loss import policy_loss
from rlpost.columns import FloatColumn, RunColumn
from rlpost.errors import DataError


def test_the_distance_of_a_token_is_the_difference_of_its_log_probs_and_0_where_masked():
    found = distances(
        FloatColumn([-1.0, -2.0, -0.5]), FloatColumn([-0.5, -3.0, -0.5]), RunColumn.of([1, 1, 0])
    )
    assert list(found) == [-0.5, 1.0, 0.0]


def test_log_probs_of_the_wrong_length_or_not_finite_are_errors():
    mask = RunColumn.of([1, 1])
    with pytest.raises(
        DataError, match="a response of 2 tokens has 2 log-probs of the policy and 1"
    ):
        distances(FloatColumn([-1.0, -1.0]), FloatColumn([-1.0]), mask)
    with pytest.raises(DataError, match="is not finite"):
        distances(FloatColumn([-1.0, -1.0]), FloatColumn([-1.0, -math.inf]), mask)
    masked = RunColumn.of([1, 0])
    assert list(distances(FloatColumn([-1.0, -1.0]), FloatColumn([-1.0, -math.inf]), masked)) == [
        0.0,
        0.0,
    ]


def test_advantages_lose_the_distance_of_each_token_times_the_coefficient():
    advantages = [(1.0, FloatColumn([0.5, -0.5]))]
    of_tokens = [[[0.25, -1.0], [2.0, 0.0]]]
    ((first, second),) = distilled(advantages, of_tokens, 2.0)
    assert list(first) == [0.5, 3.0]
    assert list(second) == [-3.5, -0.5]


def test_whitened_advantages_count_the_tokens_in_the_loss():
    """An advantage of a whole answer counts for each of its tokens."""
    advantages = [(FloatColumn([1.0, 2.0]), 3.0), (FloatColumn([9.0, 5.0]),)]
    masks = [[RunColumn.of([1, 1]), RunColumn.of([1, 0])], [RunColumn.of([0, 1])]]
    found = whitened(advantages, masks)
    flat = [value for group in found for column in group for value in column]
    weights = [1, 1, 1, 0, 0, 1]
    expected = np.array(whiten([1.0, 2.0, 3.0, 3.0, 9.0, 5.0], weights)) * weights
    assert flat == pytest.approx(expected.tolist(), rel=1e-6)
    assert sum(flat) == pytest.approx(0.0, abs=1e-6)
    assert [len(column) for group in found for column in group] == [2, 2, 2]


@pytest.fixture
def student_and_teacher() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)


def test_the_loss_has_the_gradient_of_the_divergence_in_expectation(student_and_teacher):
    """Enumerated over a vocabulary of 7: E[grad of the loss] = grad KL(student || teacher)."""
    logits, teacher = student_and_teacher
    logits.requires_grad_()
    p, q = logits.log_softmax(0), teacher.log_softmax(0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((p.exp().detach() * distillation_loss(p, q)).sum(), logits)
    assert torch.allclose(found, exact, atol=1e-12)


def test_advantage_and_loss_have_one_gradient_where_the_policy_generated_the_tokens(
    student_and_teacher,
):
    """At ratio 1: of -r A with A = -coef (log p - log q), and of coef (log p - log q)^2 / 2."""
    logits, teacher = student_and_teacher
    logits.requires_grad_()
    p, q, coef = logits.log_softmax(0), teacher.log_softmax(0), 0.7
    advantages = -coef * (p - q).detach()
    loss, _ = policy_loss(p, p.detach(), advantages, eps_clip=0.2, eps_clip_high=0.2)
    (of_advantage,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    (of_loss,) = torch.autograd.grad((coef * distillation_loss(p, q)).sum(), logits)
    assert torch.allclose(of_advantage, of_loss, atol=1e-12)


def divergence_by_hand(p: list[float], q: list[float], chosen: list[int]) -> float:
    """Over the chosen tokens and all others as one."""
    p_rest = sum(each for token, each in enumerate(p) if token not in chosen)
    q_rest = sum(each for token, each in enumerate(q) if token not in chosen)
    found = sum(p[token] * math.log(p[token] / q[token]) for token in chosen)
    return found + (p_rest * math.log(p_rest / q_rest) if p_rest else 0.0)


@pytest.mark.parametrize("k", [1, 3, 6, 7])
def test_the_divergence_over_top_tokens_and_the_rest_is_that_of_a_loop(student_and_teacher, k):
    logits, teacher = student_and_teacher
    p, q = logits.log_softmax(0), teacher.log_softmax(0)
    chosen = q.topk(k).indices
    found = top_k_divergence(p[chosen][None], q[chosen][None])
    expected = divergence_by_hand(p.exp().tolist(), q.exp().tolist(), chosen.tolist())
    assert found.tolist() == pytest.approx([expected], rel=1e-6)
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")  # KL(p || q)
    assert 0.0 <= found.item() <= exact.item() + 1e-9
    assert found.item() == pytest.approx(exact.item(), rel=1e-4) or k < 6


def test_with_the_whole_vocabulary_the_gradient_is_that_of_torchs_divergence(student_and_teacher):
    logits, teacher = student_and_teacher
    logits.requires_grad_()
    p, q = logits.log_softmax(0), teacher.log_softmax(0)
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(top_k_divergence(p[None], q[None]).sum(), logits)
    assert torch.allclose(found, wanted, atol=1e-9)


def test_leaving_the_tokens_of_the_teacher_does_not_lower_the_divergence():
    """Without the rest, a student far from them would have a sum near 0."""
    q = torch.tensor([[0.5, 0.3]]).log()
    near, far = torch.tensor([[0.45, 0.35]]).log(), torch.tensor([[0.005, 0.005]]).log()
    assert top_k_divergence(near, q) < 0.1 < 1.0 < top_k_divergence(far, q)
