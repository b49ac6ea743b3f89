"""Log-probs and entropies in chunks, against torch's log_softmax and Categorical and their own
gradients.
"""

import pytest
import torch

from rlpost.actor import logprobs, parallel

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
    return logprobs.Rows(
        torch.tensor(index), targets, TEMPERATURE, num_valid=VALID, chunk_size=chunk_size
    )


def theirs(logits, chosen):
    distribution = torch.distributions.Categorical(
        logits=logits[chosen.index_R, :VALID].double() / TEMPERATURE
    )
    return distribution.log_prob(chosen.targets_R), distribution.entropy()


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_values_and_gradients_equal_torchs_whatever_the_chunks(logits, chunk_size):
    chosen = rows([9, 2, 3, 0, 7, 10, 5], chunk_size)
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
    empty = logprobs.Rows(
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
