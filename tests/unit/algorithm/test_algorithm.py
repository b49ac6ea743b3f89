"""Advantages, loss and schedule against hand-computed numbers, torch's own formulas and the stated invariants."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.algorithm.advantage import grpo_advantages
from rlpost.algorithm.loss import policy_loss, token_weights
from rlpost.algorithm.schedule import schedule


def test_grpo_advantages_equal_torch_mean_and_unbiased_std():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    tensor = torch.tensor(rewards, dtype=torch.float64)
    expected = (tensor - tensor.mean()) / (tensor.std() + 1e-6)
    assert grpo_advantages(rewards) == pytest.approx(expected.tolist(), rel=1e-12)


def test_without_std_normalization_only_the_mean_is_taken_off():
    assert grpo_advantages([2.0, 0.0], normalize_std=False) == (1.0, -1.0)


@pytest.mark.parametrize("rewards", [[0.5], [1.0, 1.0, 1.0], [0.1] * 8])
def test_a_group_without_differences_has_zero_advantages(rewards):
    assert all(abs(value) < 1e-9 for value in grpo_advantages(rewards))


def test_policy_loss_equals_numbers_computed_by_hand():
    new = torch.log(torch.tensor([0.5, 0.9, 0.3, 0.2]))
    old = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0])
    loss, stats = policy_loss(new, old, advantages, eps_clip=0.2, eps_clip_high=0.28)
    # ratios 1, 1.8 (cut at 1.28), 0.6 (cut at 0.8: the worse of 0.6 and 0.8), 0.4 (a fall with A > 0 is not cut)
    assert loss.tolist() == pytest.approx([-1.0, -1.28, 0.8, -0.4], rel=1e-5)
    assert stats["clip_frac"].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert stats["ppo_kl"].tolist() == pytest.approx([0.0, -math.log(1.8), -math.log(0.6), -math.log(0.4)], rel=1e-5)


def test_clipped_tokens_get_no_gradient_and_others_get_minus_ratio_times_advantage():
    new = torch.log(torch.tensor([0.9, 0.5])).requires_grad_()
    loss, _ = policy_loss(
        new, torch.log(torch.tensor([0.5, 0.5])), torch.tensor([1.0, 2.0]), eps_clip=0.2, eps_clip_high=0.2
    )
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([0.0, -2.0], rel=1e-6)


def test_token_weights_make_the_sum_a_mean_over_samples_or_over_tokens():
    lengths = torch.tensor([2, 2, 3, 3, 3])
    per_sample = token_weights(lengths, num_samples=2, num_tokens=5, per_token=False)
    assert per_sample.tolist() == pytest.approx([0.25, 0.25, 1 / 6, 1 / 6, 1 / 6])
    assert token_weights(lengths, num_samples=2, num_tokens=5, per_token=True).tolist() == pytest.approx([0.2] * 5)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    ranks=st.integers(1, 6),
    limit=st.one_of(st.none(), st.integers(1, 400)),
    size=st.integers(1, 5),
)
def test_the_schedule_keeps_its_three_invariants(lengths, ranks, limit, size):
    if len(lengths) % ranks:
        with pytest.raises(ValueError, match="cannot be spread evenly"):
            schedule(lengths, data_parallel_size=ranks, max_tokens=limit, micro_batch_size=size)
        return
    dealt = schedule(lengths, data_parallel_size=ranks, max_tokens=limit, micro_batch_size=size)
    assert sorted(i for rank in dealt for micro_batch in rank for i in micro_batch) == list(range(len(lengths)))
    assert len({len(rank) for rank in dealt}) == 1
    assert all(micro_batch for rank in dealt for micro_batch in rank)
    for micro_batch in (m for rank in dealt for m in rank):
        if limit is None:
            assert len(micro_batch) <= size
        else:
            assert len(micro_batch) == 1 or sum(lengths[i] for i in micro_batch) <= limit
