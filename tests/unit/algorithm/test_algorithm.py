"""Advantages, loss and schedule compared with hand-computed numbers, torch's formulas and
invariants.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.algorithm.advantage import estimate, grpo_advantages, rloo_advantages, whiten
from rlpost.algorithm.kl import estimate_kl
from rlpost.algorithm.loss import cispo_loss, policy_loss, sequence_level, token_weights
from rlpost.algorithm.schedule import schedule
from rlpost.columns import RunColumn


def test_grpo_advantages_equal_torch_mean_and_unbiased_std():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    tensor = torch.tensor(rewards, dtype=torch.float64)
    expected = (tensor - tensor.mean()) / (tensor.std() + 1e-6)
    assert grpo_advantages(rewards) == pytest.approx(expected.tolist(), rel=1e-12)


def test_without_std_normalization_only_the_mean_is_subtracted():
    assert grpo_advantages([2.0, 0.0], normalize_std=False) == (1.0, -1.0)


@pytest.mark.parametrize("rewards", [[0.5], [1.0, 1.0, 1.0], [0.1] * 8])
def test_a_group_without_differences_has_zero_advantages(rewards):
    assert all(abs(value) < 1e-9 for value in grpo_advantages(rewards))


def test_policy_loss_equals_numbers_computed_by_hand():
    new = torch.log(torch.tensor([0.5, 0.9, 0.3, 0.2]))
    old = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0])
    loss, stats = policy_loss(new, old, advantages, eps_clip=0.2, eps_clip_high=0.28)
    # ratios 1, 1.8 (clipped at 1.28), 0.6 (clipped at 0.8: the worse of 0.6 and 0.8), 0.4 (a fall with A >
    # 0 is not clipped)
    assert loss.tolist() == pytest.approx([-1.0, -1.28, 0.8, -0.4], rel=1e-5)
    assert stats["clip_frac"].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert stats["ppo_kl"].tolist() == pytest.approx(
        [0.0, -math.log(1.8), -math.log(0.6), -math.log(0.4)], rel=1e-5
    )


def test_clipped_tokens_get_no_gradient_and_others_get_minus_ratio_times_advantage():
    new = torch.log(torch.tensor([0.9, 0.5])).requires_grad_()
    loss, _ = policy_loss(
        new,
        torch.log(torch.tensor([0.5, 0.5])),
        torch.tensor([1.0, 2.0]),
        eps_clip=0.2,
        eps_clip_high=0.2,
    )
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([0.0, -2.0], rel=1e-6)


def test_token_weights_make_the_sum_a_mean_over_samples_or_over_tokens():
    lengths = torch.tensor([2, 2, 3, 3, 3])
    per_sample = token_weights(lengths, num_samples=2, num_tokens=5, per_token=False)
    assert per_sample.tolist() == pytest.approx([0.25, 0.25, 1 / 6, 1 / 6, 1 / 6])
    assert token_weights(
        lengths, num_samples=2, num_tokens=5, per_token=True
    ).tolist() == pytest.approx([0.2] * 5)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    ranks=st.integers(1, 6),
    limit=st.one_of(st.none(), st.integers(1, 400)),
    size=st.integers(1, 5),
    multiple=st.integers(1, 3),
)
def test_the_schedule_keeps_its_invariants(lengths, ranks, limit, size, multiple):
    options = dict(
        data_parallel_size=ranks, max_tokens=limit, micro_batch_size=size, multiple_of=multiple
    )
    if len(lengths) % (ranks * multiple):
        with pytest.raises(ValueError, match="cannot distribute"):
            schedule(lengths, **options)
        return
    dealt = schedule(lengths, **options)
    assert all(len(rank) % multiple == 0 for rank in dealt)
    assert sorted(i for rank in dealt for micro_batch in rank for i in micro_batch) == list(
        range(len(lengths))
    )
    assert len({len(rank) for rank in dealt}) == 1
    assert all(micro_batch for rank in dealt for micro_batch in rank)
    for micro_batch in (m for rank in dealt for m in rank):
        if limit is None:
            assert len(micro_batch) <= size
        else:
            assert len(micro_batch) == 1 or sum(lengths[i] for i in micro_batch) <= limit


def test_leave_one_out_compares_each_answer_with_the_others():
    assert rloo_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert rloo_advantages([5.0]) == (0.0,)


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 50)), min_size=2, max_size=20))
def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_tokens(pairs):
    advantages, lengths = zip(*pairs, strict=True)
    whitened = torch.tensor(whiten(advantages, lengths), dtype=torch.float64).repeat_interleave(
        torch.tensor(lengths)
    )
    assert whitened.mean().abs() < 1e-6
    if torch.tensor(advantages).var() > 1e-2:
        assert whitened.var(unbiased=False).item() == pytest.approx(1.0, abs=1e-4)


def test_the_baseline_form_subtracts_the_group_mean_and_reinforce_plus_plus_does_not():
    groups = [[1.0, 1.0], [0.0, 0.0]]
    masks = [[RunColumn([(1, length)]) for length in of_group] for of_group in ((3, 5), (4, 4))]
    assert estimate("reinforce_plus_plus_baseline", groups, masks, normalize_std=True) == [
        (0.0, 0.0),
        (0.0, 0.0),
    ]
    plain = estimate("reinforce_plus_plus", groups, masks, normalize_std=True)
    assert [a for group in plain for a in group] == pytest.approx([1.0, 1.0, -1.0, -1.0])
    for name in ("grpo", "gspo", "cispo"):
        assert estimate(name, groups, masks, normalize_std=True) == [(0.0, 0.0), (0.0, 0.0)]


def test_the_dual_clip_bounds_the_loss_of_bad_answers_only():
    new, old = torch.log(torch.tensor([0.9, 0.9])), torch.log(torch.tensor([0.1, 0.1]))
    loss, stats = policy_loss(
        new, old, torch.tensor([-1.0, 1.0]), eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=3.0
    )
    assert loss.tolist() == pytest.approx([3.0, -1.2])
    assert stats["clip_frac"].tolist() == [1.0, 1.0]


def test_cispo_gives_every_token_the_gradient_of_its_clipped_weight():
    new = torch.log(torch.tensor([0.9, 0.5, 0.1])).requires_grad_()
    old, advantages = torch.log(torch.tensor([0.5, 0.5, 0.5])), torch.tensor([1.0, 2.0, -1.0])
    loss, stats = cispo_loss(new, old, advantages, eps_clip=0.2, eps_clip_high=0.28)
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([-1.28, -2.0, 0.8], rel=1e-6)
    assert stats["clip_frac"].tolist() == [1.0, 0.0, 1.0]


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
