"""Advantages, losses and divergences compared with formulas of papers and of torch."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlpost.algorithm.advantage import (
    AnswerGroup,
    estimate,
    grpo_advantages,
    rloo_advantages,
)
from rlpost.algorithm.kl import estimate_kl
from rlpost.algorithm.loss import cispo_loss, policy_loss, sequence_level, token_weights
from rlpost.columns import RunColumn


def test_grpo_advantages_equal_torch_mean_and_unbiased_std():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    tensor = torch.tensor(rewards, dtype=torch.float64)
    expected = (tensor - tensor.mean()) / (tensor.std() + 1e-6)
    assert grpo_advantages(rewards) == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize("rewards", [[0.5], [1.0, 1.0, 1.0], [0.1] * 8])
def test_a_group_without_differences_has_zero_advantages(rewards):
    for advantages in (grpo_advantages(rewards), rloo_advantages(rewards)):
        assert all(abs(value) < 1e-9 for value in advantages)


LOG_RATIOS = (-30.0, -20.5, -5.0, -0.25, -0.125, 0.0, 0.125, 0.25, 0.625, 5.0, 20.5, 30.0)
PAIRS = torch.cartesian_prod(
    torch.tensor(LOG_RATIOS, dtype=torch.float64), torch.tensor([-2.0, -0.5, 0.0, 3.0]).double()
)


def loss_and_gradient(loss, **options):
    """``loss`` over all PAIRS, whose old log-probs are -1: its values, gradient, statistics."""
    new = (PAIRS[:, 0] - 1).requires_grad_()
    values, stats = loss(new, torch.full_like(new, -1), PAIRS[:, 1], **options)
    values.sum().backward()
    assert not any(value.requires_grad for value in stats.values())
    return values.tolist(), new.grad.tolist(), {name: of.tolist() for name, of in stats.items()}


@pytest.mark.parametrize("eps_clip_c", [None, 3.0, math.exp(5.0)])
def test_policy_loss_is_the_surrogate_of_ppo_case_by_case(eps_clip_c):
    """Good answers gain up to 1 + eps_clip_high; bad ones lose from 1 - eps_clip to eps_clip_c."""
    losses, gradients, stats = loss_and_gradient(
        policy_loss, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=eps_clip_c
    )
    for i, (log_ratio, advantage) in enumerate(PAIRS.tolist()):
        log_ratio = min(max(log_ratio, -20.0), 20.0)
        ratio = math.exp(log_ratio)
        is_high, is_low = advantage > 0 and ratio > 1.28, advantage < 0 and ratio < 0.8
        is_dual = advantage < 0 and eps_clip_c is not None and ratio > eps_clip_c
        used = 1.28 if is_high else 0.8 if is_low else eps_clip_c if is_dual else ratio
        assert losses[i] == pytest.approx(-used * advantage)
        is_constant = is_high or is_low or is_dual or abs(log_ratio) == 20
        if ratio != eps_clip_c:  # where the branches meet, torch halves the gradient
            assert gradients[i] == pytest.approx(0.0 if is_constant else -ratio * advantage)
        assert {name: values[i] for name, values in stats.items()} == {
            "ppo_kl": -log_ratio,
            "ratio": pytest.approx(ratio),
            "ratio_max": pytest.approx(ratio),
            "clip_frac": is_high or is_low or is_dual,
            "clip_frac_low": is_low,
            "clip_frac_high": is_high,
            "dual_clip_frac": is_dual,
        }


def test_cispo_gives_every_token_the_gradient_of_its_clipped_weight():
    losses, gradients, stats = loss_and_gradient(cispo_loss, eps_clip=0.2, eps_clip_high=0.28)
    for i, (log_ratio, advantage) in enumerate(PAIRS.tolist()):
        ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
        weight = sorted((0.8, ratio, 1.28))[1]
        assert gradients[i] == pytest.approx(-weight * advantage)
        assert losses[i] == pytest.approx(-weight * advantage * (log_ratio - 1))
        assert stats["ratio"][i] == pytest.approx(ratio)
        assert stats["clip_frac"][i] == (weight != ratio) and not stats["dual_clip_frac"][i]


def test_token_weights_make_the_sum_a_mean_over_samples_or_over_tokens():
    lengths = torch.tensor([1, 2, 2, 3, 3, 3])
    losses = torch.arange(6) + 1.0
    mean = lambda **option: (  # noqa: E731
        token_weights(lengths, num_samples=3, num_tokens=6, **option) * losses
    ).sum()
    assert mean(per_token=True).item() == pytest.approx(losses.mean().item())
    means = [part.mean().item() for part in losses.split((1, 2, 3))]
    assert mean(per_token=False).item() == pytest.approx(sum(means) / 3)
    assert token_weights(torch.tensor([0]), num_samples=1, num_tokens=1, per_token=False).isfinite()


def answer_groups(rewards, masks, penalties=None):
    """Groups of answers, of which all tokens in the loss were generated."""
    charged = penalties or [None] * len(rewards)
    return [
        AnswerGroup(*group[:2], [mask.total() for mask in group[1]], group[2])
        for group in zip(rewards, masks, charged, strict=True)
    ]


@example([(2.0, 1), (1.0, 0)], 1)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 50)), min_size=2, max_size=20),
    st.integers(1, 19),
)
def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_tokens(pairs, cut):
    """Over all groups together; an answer without a trained token counts for nothing."""
    groups = [group for group in (pairs[:cut], pairs[cut:]) if group]
    rewards = [[reward for reward, _ in group] for group in groups]
    masks = [[RunColumn([(1, length), (0, 2)]) for _, length in group] for group in groups]
    options = dict(normalize_std=True, normalize_advantages=True, gamma=1.0)
    groups = answer_groups(rewards, masks)
    whitened = itertools.chain(*estimate("grpo", groups, raw=True, **options))
    plain, lengths = zip(*pairs, strict=True)
    tokens, plain = np.repeat(list(whitened), lengths), np.repeat(plain, lengths)
    assert not tokens.size or abs(tokens.mean()) < 1e-6
    if tokens.size and plain.var() > 1e-2:
        assert tokens.var() == pytest.approx(1.0, abs=1e-4)


def test_estimators_with_a_baseline_give_equal_rewards_no_advantage():
    masks = [[RunColumn([(1, length)]) for length in of_group] for of_group in ((3, 5), (4, 4))]
    groups = answer_groups([[1.0, 1.0], [0.0, 0.0]], masks)
    for name in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"):
        assert estimate(name, groups, normalize_std=True, gamma=1.0) == [(0.0, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize("has_penalties", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_reinforce_plus_plus_whitens_the_discounted_returns_of_trained_tokens(gamma, has_penalties):
    """Each is a row of the matrix of powers of gamma, times the rewards of trained tokens."""
    rewards, masks = [[1.0], [0.5, -2.0]], [[(1, 0, 0, 1, 1, 0)], [(1, 1), (0, 0, 1)]]
    penalties = [[(0.1, 0.0, 0.0, 0.2, 0.4, 0.0)], [(-0.3, 0.7), (0.0, 0.0, 0.9)]]
    columns = [[RunColumn.of(mask) for mask in group] for group in masks]
    groups = answer_groups(rewards, columns, penalties if has_penalties else None)
    found = estimate("reinforce_plus_plus", groups, normalize_std=True, gamma=gamma)
    returns, advantages = [], []
    for of_group in zip(rewards, masks, penalties, found, strict=True):
        for reward, mask, charged, advantage in zip(*of_group, strict=True):
            trained = np.flatnonzero(mask)
            own = -np.array(charged)[trained] * has_penalties
            own[-1] += reward
            exponents = np.subtract.outer(-np.arange(len(own)), -np.arange(len(own)))
            returns += (np.triu(float(gamma) ** np.maximum(exponents, 0)) @ own).tolist()
            is_one_number = isinstance(advantage, float)
            assert is_one_number == (gamma == 1.0 and not has_penalties)
            advantages += [advantage if is_one_number else advantage[t] for t in trained]
    expected = (np.array(returns) - np.mean(returns)) / np.sqrt(np.var(returns) + 1e-8)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


ONE = RunColumn.of((1,))


@pytest.mark.parametrize(
    ("estimator", "rewards", "masks", "penalties"),
    [
        ("grpo", [[1.0]], [[ONE]], [[[0.1], [0.1]]]),
        ("grpo", [[1.0, 0.0]], [[ONE, ONE]], [[[0.1]]]),
        ("opo", [[1.0, 0.0]], [[ONE]], None),
        ("reinforce_plus_plus", [[1.0, 0.0]], [[ONE]], None),
        ("reinforce_plus_plus", [[1.0, 0.0]], [[ONE]], [[[0.1]]]),
        ("reinforce_plus_plus", [[1.0]], [[ONE]], [[[0.1, 0.2]]]),
    ],
)
def test_rewards_masks_and_penalties_of_other_lengths_are_refused(
    estimator, rewards, masks, penalties
):
    """A sample without its counterpart is never dropped."""
    with pytest.raises(ValueError):
        estimate(estimator, answer_groups(rewards, masks, penalties), normalize_std=True, gamma=1.0)


def test_the_gradient_at_sequence_level_is_that_of_the_paper():
    """GSPO, equation 5: the ratio is exp of the mean log-ratio of the sequence; differentiated here
    as it stands.
    """
    old, advantage = torch.tensor([-1.0, -2.0, -0.5]), 1.7
    start = torch.tensor([-1.1, -1.9, -0.6])
    ours = start.clone().requires_grad_()
    mean = (ours - old).mean().expand(3)
    clip = dict(eps_clip=0.2, eps_clip_high=0.2)
    loss, _ = policy_loss(
        sequence_level(ours, mean), torch.zeros(3), torch.full((3,), advantage), **clip
    )
    loss.mean().backward()
    theirs = start.clone().requires_grad_()
    expected = -((theirs - old).mean().exp() * advantage)
    expected.backward()
    assert loss.mean().item() == pytest.approx(expected.item())
    assert torch.allclose(ours.grad, theirs.grad)


def test_expected_k1_and_k3_are_the_divergence_and_the_expected_gradient_of_k2_is_its_gradient():
    """Over all tokens of a small vocabulary, against torch's own kl_div."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.2, 0.5, -0.4], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = torch.nn.functional.kl_div(ref, logprobs, log_target=True, reduction="sum")
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for kind in ("k1", "k3", "low_var_kl"):
        assert (logprobs.exp() * estimate_kl(logprobs, ref, kind)).sum().item() == pytest.approx(
            exact.item()
        )
    k2 = (logprobs.exp().detach() * estimate_kl(logprobs, ref, "k2")).sum()
    assert torch.allclose(torch.autograd.grad(k2, logits)[0], gradient)
    far = estimate_kl(torch.tensor([-9.0]), torch.tensor([-1.0]), "low_var_kl")
    assert far.item() == 10.0
    with pytest.raises(ValueError, match="choose k1, k2, k3, low_var_kl"):
        estimate_kl(ref, ref, "k4")


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_a_token_far_from_the_reference_leaves_numbers_and_one_that_is_masked_no_gradient(kind):
    """The output of a tool may be as unlikely as it likes: exp(100) is beyond float32."""
    logprobs = torch.tensor([-101.0, -1.0], requires_grad=True)
    loss = (
        estimate_kl(logprobs, torch.tensor([-1.0, -1.5]), kind) * torch.tensor([0.0, 1.0])
    ).sum()
    loss.backward()
    assert loss.isfinite() and logprobs.grad[0] == 0.0 and logprobs.grad[1] != 0.0
