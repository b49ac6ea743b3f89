"""The chunked delta rule and the short convolution, compared with loops over sequences and tokens."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from rlpost.trainer import delta_rule
from rlpost.trainer.delta_rule import gated_delta_rule, short_convolution

LENGTHS = (1, 9, 4, 5)
HEADS, KEY_DIM, VALUE_DIM = 3, 4, 6


def starts() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


def random_inputs() -> list[torch.Tensor]:
    torch.manual_seed(5)
    total = sum(LENGTHS)
    key = F.normalize(torch.randn(total, HEADS, KEY_DIM), dim=-1)
    query, value = torch.randn(total, HEADS, KEY_DIM), torch.randn(total, HEADS, VALUE_DIM)
    decay, beta = -torch.rand(total, HEADS) * 3, torch.rand(total, HEADS)
    return [each.requires_grad_() for each in (query, key, value, decay, beta)]


def by_token(query, key, value, decay, beta):
    """The recurrence of the module's docstring."""
    outputs = []
    for begin, end in zip(starts().tolist(), starts().tolist()[1:], strict=False):
        state = torch.zeros(HEADS, KEY_DIM, VALUE_DIM)
        for t in range(begin, end):
            state = state * decay[t].exp()[:, None, None]
            stored = torch.einsum("hkv,hk->hv", state, key[t])
            correction = (value[t] - stored) * beta[t][:, None]
            state = state + torch.einsum("hk,hv->hkv", key[t], correction)
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]))
    return torch.stack(outputs)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_compute_the_recurrence_that_starts_again_at_each_sequence(chunk):
    """Outputs and all gradients, with sequences shorter, equal and longer than a chunk."""
    inputs = random_inputs()
    expected, ours = by_token(*inputs), gated_delta_rule(*inputs, starts(), chunk=chunk)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(expected)
    of_ours = torch.autograd.grad((ours * weight).sum(), inputs)
    of_expected = torch.autograd.grad((expected * weight).sum(), inputs)
    torch.testing.assert_close(of_ours, of_expected, rtol=1e-4, atol=1e-5)


def test_strong_decay_neither_overflows_nor_yields_nan():
    query, key, value, decay, beta = random_inputs()
    ours = gated_delta_rule(query, key, value, decay * 100, beta, starts(), chunk=8)
    gradients = torch.autograd.grad(ours.sum(), (query, key, value, decay, beta))
    assert all(torch.isfinite(each).all() for each in (ours, *gradients))


def test_a_convolution_sees_only_earlier_tokens_of_its_sequence():
    channels, weight = torch.randn(sum(LENGTHS), 5), torch.randn(5, 4)
    ours = short_convolution(channels, weight, starts())
    for part, expected in zip(channels.split(LENGTHS), ours.split(LENGTHS), strict=True):
        alone = F.conv1d(F.pad(part.t(), (3, 0)), weight[:, None], groups=5).t()
        torch.testing.assert_close(expected, alone)


@pytest.mark.parametrize(
    ("has_cuda", "key_dim", "uses"), [(True, 4, 1), (True, 300, 0), (False, 4, 0)]
)
def test_kernels_get_packed_rows_with_narrow_keys_that_several_heads_share(
    monkeypatch, has_cuda, key_dim, uses
):
    """flash-linear-attention takes one row: [1, T, heads, width], with boundaries of sequences."""
    calls = []

    def chunk_gated_delta_rule(q, k, v, g, beta, *, scale, cu_seqlens):
        shapes = [tuple(each.shape) for each in (q, k, v, g, beta)]
        calls.append((shapes, {each.dtype for each in (q, k, v)}, scale, cu_seqlens))
        return v * 2, None

    package = ModuleType("fla")
    package.__spec__ = ModuleSpec("fla", None)
    ops = ModuleType("fla.ops.gated_delta_rule")
    ops.chunk_gated_delta_rule = chunk_gated_delta_rule
    for module in (package, ModuleType("fla.ops"), ops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    delta_rule.kernels.cache_clear()
    total, heads = sum(LENGTHS), 2 * HEADS
    keys = F.normalize(torch.randn(total, HEADS, key_dim), dim=-1)
    value = torch.randn(total, heads, VALUE_DIM, dtype=torch.bfloat16)
    decay, beta = -torch.rand(total, heads), torch.rand(total, heads)
    output = delta_rule.delta_rule(keys, keys, value, decay, beta, starts())
    delta_rule.kernels.cache_clear()
    assert (output.shape, output.dtype) == (value.shape, torch.bfloat16)
    assert len(calls) == uses
    for shapes, dtypes, scale, given in calls:
        rows = [(1, total, *shape) for shape in [(HEADS, key_dim)] * 2 + [(heads, VALUE_DIM)]]
        assert shapes == [*rows, (1, total, heads), (1, total, heads)]
        assert dtypes == {torch.bfloat16} and scale == 1.0
        assert given.equal(starts()) and output.equal(value * 2)


def test_without_the_package_the_loop_over_chunks_is_used_and_named(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    delta_rule.kernels.cache_clear()
    assert delta_rule.kernels() is None
    delta_rule.kernels.cache_clear()
    assert "no kernels of fla-core (" in caplog.text
