"""Log-probs and entropies in chunks, compared with torch's functions and their gradients."""

from dataclasses import replace

import pytest
import torch

from rlpost.trainer import logprobs, parallel

ROWS, COLUMNS, VALID, TEMPERATURE = 11, 13, 12, 0.7


class Alone:
    """The tensor-parallel group of one rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


@pytest.fixture
def logits(monkeypatch):
    monkeypatch.setattr(parallel, "tensor_parallel_group", Alone)
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5)) * 3


def rows(index, chunk_size):
    targets = torch.arange(len(index)) % VALID
    return logprobs.LogitRows(
        torch.tensor(index), targets, TEMPERATURE, num_valid=VALID, chunk_size=chunk_size
    )


def theirs(logits, chosen):
    distribution = torch.distributions.Categorical(
        logits=logits[chosen.index_R, :VALID].double() / TEMPERATURE
    )
    return distribution.log_prob(chosen.targets_R), distribution.entropy()


@pytest.mark.parametrize(
    ("chunk_size", "repeated"), [(1, 5), (4, 5), (100, 5), (1, 9), (4, 9), (100, 9)]
)
def test_values_and_gradients_equal_torchs_whatever_the_chunks(logits, chunk_size, repeated):
    """Also where samples share row 9, and beside columns that are no tokens."""
    chosen = rows([9, 2, 3, 0, 7, 10, repeated], chunk_size)
    chosen = replace(chosen, may_repeat=repeated == 9)
    ours, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, wanted = (
        logprobs.response_logprobs(ours, chosen, with_entropy=True),
        theirs(expected, chosen),
    )
    weights = torch.linspace(-1, 2, 7), torch.linspace(0.5, -3, 7)
    sum((weight * value).sum() for weight, value in zip(weights, found, strict=True)).backward()
    sum((weight * value).sum() for weight, value in zip(weights, wanted, strict=True)).backward()
    for value, right in zip(found, wanted, strict=True):
        assert torch.allclose(value.double(), right, rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours.grad, expected.grad, rtol=1e-5, atol=1e-6)
    assert ours.grad[:, VALID:].abs().max() == 0 and ours.grad[1].abs().max() == 0


def test_without_entropy_the_log_probs_are_the_same_and_their_gradient_too(logits):
    chosen = rows([1, 4, 6], 2)
    both, alone = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    first, second = (
        logprobs.response_logprobs(both, chosen, with_entropy=True)[0],
        logprobs.response_logprobs(alone, chosen, with_entropy=False)[0],
    )
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(first, second) and torch.equal(both.grad, alone.grad)


def test_a_rank_without_response_tokens_has_a_gradient_of_zeros(logits):
    """So it is with context parallelism, when its part of every sequence is prompt."""
    own = logits.clone().requires_grad_()
    empty = logprobs.LogitRows(
        torch.zeros(0).long(), torch.zeros(0).long(), TEMPERATURE, num_valid=VALID, chunk_size=4
    )
    found, entropy = logprobs.response_logprobs(own, empty, with_entropy=True)
    assert found.shape == entropy.shape == (0,)
    found.sum().backward()
    assert own.grad.abs().max() == 0


def test_no_float32_copy_of_all_rows_is_kept_for_the_backward_pass(logits):
    """What autograd holds on to is the logits themselves and two numbers a row."""
    own = logits.bfloat16().requires_grad_()
    held = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor
    ):
        logprobs.response_logprobs(own, rows(list(range(ROWS)), 2), with_entropy=True)
    assert sum(tensor.numel() for tensor in held if tensor.dtype == torch.float32) == 2 * ROWS


def warped(logits, chosen, top_k, top_p):
    """Scaled logits with -inf where transformers' warpers remove a token; the target stays."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    scores = logits[chosen.index_R, :VALID].double() / TEMPERATURE
    removed = TopKLogitsWarper(top_k)(None, scores).isinf()
    removed |= TopPLogitsWarper(top_p)(None, scores).isinf()
    removed.scatter_(1, chosen.targets_R[:, None], False)
    return scores.masked_fill(removed, -torch.inf)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_under_a_sampling_mask_both_are_of_the_distribution_that_was_sampled_from(
    logits, chunk_size
):
    chosen = rows([9, 2, 3, 0, 7, 10, 5], chunk_size)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    scores = warped(theirs, chosen, 5, 0.9)
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in scores.detach()]
    assert 1 < min(map(len, kept)) < max(map(len, kept)) < VALID
    kept[3] = []  # the whole vocabulary
    scores = torch.where(
        torch.arange(7)[:, None] == 3, theirs[chosen.index_R, :VALID] / TEMPERATURE, scores
    )
    masks = logprobs.SamplingMasks(
        torch.tensor([len(each) for each in kept]),
        torch.tensor([token for each in kept for token in each]),
    )
    found = logprobs.response_logprobs(ours, replace(chosen, masks=masks), with_entropy=True)
    log_p = scores.log_softmax(1)
    terms = torch.where(log_p.isfinite(), log_p, 0.0)
    wanted = (
        log_p.gather(1, chosen.targets_R[:, None])[:, 0],
        -(terms.exp() * terms * log_p.isfinite()).sum(1),
    )
    weights = torch.linspace(-1, 2, 7), torch.linspace(0.5, -3, 7)
    sum((weight * value).sum() for weight, value in zip(weights, found, strict=True)).backward()
    sum((weight * value).sum() for weight, value in zip(weights, wanted, strict=True)).backward()
    for value, right in zip(found, wanted, strict=True):
        assert torch.allclose(value.double(), right, rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_sampled_token_outside_of_its_mask_counts_as_part_of_it(logits):
    """Rounding at the border of top-p must not give a log-prob of -inf."""
    chosen = rows([4], 2)  # the target is 0
    masks = logprobs.SamplingMasks(torch.tensor([2]), torch.tensor([3, 5]))
    (found,), _ = logprobs.response_logprobs(
        logits, replace(chosen, masks=masks), with_entropy=False
    )
    kept = logits[4, [0, 3, 5]] / TEMPERATURE
    assert found == pytest.approx(kept.log_softmax(0)[0].item(), rel=1e-5)


def test_several_targets_a_row_have_the_values_and_gradients_of_log_softmax(logits):
    index = [9, 2, 3, 0, 7]
    targets = torch.tensor([[0, 3, 3], [1, 1, 1], [11, 0, 5], [2, 4, 6], [7, 8, 9]])
    chosen = replace(rows(index, 2), targets_R=targets)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found, _ = logprobs.response_logprobs(ours, chosen, with_entropy=False)
    wanted = (theirs[index, :VALID] / TEMPERATURE).log_softmax(1).gather(1, targets)
    weights = torch.linspace(-1, 2, 15).view(5, 3)
    (weights * found).sum().backward()
    (weights * wanted).sum().backward()
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
