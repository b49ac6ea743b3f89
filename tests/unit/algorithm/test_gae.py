"""GAE and the value loss compared with loops and with TRL."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rlpost.algorithm.answers import Answer
from rlpost.algorithm.gae import (
    Discounts,
    discounted_sums,
    estimate_with_values,
    gae,
    token_rewards,
)
from rlpost.algorithm.loss import value_loss
from rlpost.algorithm.turns import TurnReward, turn_record
from rlpost.columns import FloatColumn
from rlpost.types import Sample, SampleGroup, ScoredSample

SOURCE = np.random.default_rng(5)


def loop_of_trl(rewards, values, gamma, lam):
    """TRL's PPOTrainer, for one response: advantages from the last token to the first."""
    last, reversed_advantages = 0.0, []
    for t in reversed(range(len(rewards))):
        next_value = values[t + 1] if t < len(rewards) - 1 else 0.0
        delta = rewards[t] + gamma * next_value - values[t]
        last = delta + gamma * lam * last
        reversed_advantages.append(last)
    advantages = np.array(reversed_advantages[::-1])
    return advantages, advantages + values


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 700, 5001])
def test_gae_is_that_of_trl_in_chunks_of_any_length(length, gamma, lambd):
    rewards, values = SOURCE.normal(size=(2, length))
    expected = loop_of_trl(rewards, values, gamma, lambd)
    chunks = [None, 1, 7, length, 2 * length, *SOURCE.integers(2, length + 2, size=3)]
    for chunk in chunks:
        found = gae(rewards, values, Discounts(gamma, lambd), chunk=chunk)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-6)
    assert discounted_sums(np.zeros(0), gamma).tolist() == []


def scored(mask, reward, index=0, **extra):
    length = len(mask)
    sample = Sample(
        0,
        index,
        (1,),
        range(length),
        (0.0,) * length,
        "",
        "stop",
        0,
        loss_mask=mask,
        extra=extra,
    )
    return ScoredSample(sample, reward)


def test_the_reward_is_at_the_last_trained_token_and_penalties_are_at_all_of_them():
    one = Answer((scored([1, 1, 0, 1, 0], 2.0),))
    assert token_rewards(one, None).tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]
    assert token_rewards(one, [0.5, 0.25, 9.0, 1.0, 9.0]).tolist() == [-0.5, -0.25, 0.0, 1.0, 0.0]
    turns = turn_record([TurnReward(0, 2, 0.5, 0), TurnReward(3, 5, -1.0, 1)])
    by_turn = Answer((scored([1, 1, 0, 1, 0], 7.0, **turns),))
    assert token_rewards(by_turn, None).tolist() == [0.0, 0.5, 0.0, -1.0, 0.0]


def test_tool_tokens_are_not_actions():
    """The same estimates as of the response without them, whatever the values there are."""
    discounts = Discounts(0.9, 0.8)
    whole = [SampleGroup(0, (scored([1, 0, 0, 1, 1], 1.0),))]
    short = [SampleGroup(0, (scored([1, 1, 1], 1.0),))]
    values = [[FloatColumn([0.5, 99.0, -99.0, 0.25, 2.0])]]
    found = estimate_with_values(whole, values, None, discounts, normalize_advantages=False)
    expected = estimate_with_values(
        short, [[FloatColumn([0.5, 0.25, 2.0])]], None, discounts, normalize_advantages=False
    )
    for ours, theirs in (
        (found.advantages[0][0], expected.advantages[0][0]),
        (found.returns[0][0], expected.returns[0][0]),
    ):
        assert [ours[i] for i in (0, 3, 4)] == list(theirs)
        assert ours[1] == ours[2] == 0.0
    assert found.metrics == expected.metrics


def test_a_rollout_is_estimated_by_answer_and_whitened_over_its_tokens():
    source = random.Random(2)
    groups, values, penalties = [], [], []
    for prompt in range(3):
        lengths = [source.randint(1, 9) for _ in range(2)]
        own = [scored([1] * n, source.random(), index) for index, n in enumerate(lengths)]
        groups.append(SampleGroup(prompt, tuple(own)))
        values.append([FloatColumn([source.gauss(0, 1) for _ in range(n)]) for n in lengths])
        penalties.append([[source.random() for _ in range(n)] for n in lengths])
    discounts = Discounts(0.97, 0.9)
    plain = estimate_with_values(groups, values, penalties, discounts, normalize_advantages=False)
    white = estimate_with_values(groups, values, penalties, discounts, normalize_advantages=True)
    assert plain.returns == white.returns
    flat = []
    for group, own, charged, advantages in zip(
        groups, values, penalties, plain.advantages, strict=True
    ):
        for one, value, penalty, found in zip(group.samples, own, charged, advantages, strict=True):
            rewards = -np.array(penalty)
            rewards[-1] += one.reward
            expected, _ = loop_of_trl(rewards, np.array(list(value)), 0.97, 0.9)
            np.testing.assert_allclose(list(found), expected, atol=1e-6)
            flat += expected.tolist()
    whitened = [value for group in white.advantages for one in group for value in one]
    expected = (np.array(flat) - np.mean(flat)) / np.sqrt(np.var(flat) + 1e-8)
    np.testing.assert_allclose(whitened, expected, atol=1e-5)


def test_values_that_are_the_returns_explain_all_of_their_variance():
    groups = [SampleGroup(0, (scored([1, 1], 1.0), scored([1, 1], 0.0, 1)))]
    right = [[FloatColumn([1.0, 1.0]), FloatColumn([0.0, 0.0])]]
    found = estimate_with_values(
        groups, right, None, Discounts(1.0, 1.0), normalize_advantages=False
    )
    assert found.metrics["train/value_explained_var"] == 1.0
    none = [[FloatColumn([0.5, 0.5]), FloatColumn([0.5, 0.5])]]
    found = estimate_with_values(
        groups, none, None, Discounts(1.0, 1.0), normalize_advantages=False
    )
    assert found.metrics["train/value_explained_var"] == 0.0
    assert found.metrics["train/return_mean"] == found.metrics["train/value_mean"] == 0.5


def loss_of_trl(vpred, values, returns, mask, cliprange_value):
    """TRL's PPOTrainer: value loss and its clip fraction of a padded micro-batch."""
    clipped = torch.clamp(vpred, values - cliprange_value, values + cliprange_value)
    losses1, losses2 = torch.square(vpred - returns), torch.square(clipped - returns)
    largest = torch.max(losses1, losses2)
    mean = (largest * mask).sum() / mask.sum()
    frac = ((losses2 > losses1).float() * mask).sum() / mask.sum()
    return 0.5 * mean, frac


def test_the_value_loss_and_its_gradient_are_those_of_trl():
    source = torch.Generator().manual_seed(4)
    draw = lambda: torch.randn(200, generator=source, dtype=torch.float64)  # noqa: E731
    values, returns, mask = draw(), draw(), (draw() > -0.5).double()
    vpred = (values + 0.3 * draw()).requires_grad_()
    expected, expected_frac = loss_of_trl(vpred, values, returns, mask, 0.2)
    (expected_grad,) = torch.autograd.grad(expected, vpred)
    loss, stats = value_loss(vpred, values, returns, value_clip=0.2)
    mean = (loss * mask).sum() / mask.sum()
    (grad,) = torch.autograd.grad(mean, vpred)
    assert mean.item() == pytest.approx(expected.item(), abs=1e-9)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-9)
    frac = (stats["value_clip_frac"] * mask).sum() / mask.sum()
    assert frac.item() == pytest.approx(expected_frac.item()) and 0 < frac < 1
    assert torch.equal(stats["value_loss"], loss.detach()) and not stats["value_loss"].requires_grad
    plain, stats = value_loss(vpred, values, returns, value_clip=None)
    torch.testing.assert_close(plain, 0.5 * (vpred - returns).square())
    assert not stats["value_clip_frac"].any()
