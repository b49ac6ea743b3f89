"""The plugin that replaces SGLang's Triton kernels without CUDA."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.unit.rollout.plugins import load_plugin

NAME = "rlpost_triton_on_cpu"


@pytest.fixture
def plugin() -> ModuleType:
    return load_plugin(NAME)


def refused(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("a kernel was launched without CUDA")


@pytest.mark.parametrize("do_add", [True, False])
def test_the_shared_expert_is_gated_as_in_transformers(plugin, monkeypatch, do_add):
    """Compare with ``Qwen2MoeSparseMoeBlock.forward``, whose gate has one output."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hidden, shared, output = (torch.randn(5, 8) for _ in range(3))
    gate = torch.nn.Linear(8, 1, bias=False).requires_grad_(False)
    expected = torch.sigmoid(gate(hidden)) * shared + (output if do_add else 0.0)
    plugin.gate(refused, hidden, gate.weight.squeeze(), shared, output, do_add=do_add)
    torch.testing.assert_close(output, expected)


def test_norms_across_two_ranks_are_those_of_torch(plugin, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wholes = torch.randn(3, 16), torch.randn(3, 8)
    weights = torch.randn(16), torch.randn(8)
    expected = [
        torch.nn.functional.rms_norm(whole, whole.shape[-1:], weight, eps=1e-3)
        for whole, weight in zip(wholes, weights, strict=True)
    ]
    ranks = list(zip(*(whole.chunk(2, -1) for whole in wholes), strict=True))
    sums = sum(plugin.sums_of_squares(refused, *rank) for rank in ranks)
    parts = zip(*(weight.chunk(2) for weight in weights), strict=True)
    found = [
        plugin.normalise(refused, *rank, *own, sums, 2, 1e-3)
        for rank, own in zip(ranks, parts, strict=True)
    ]
    for whole, of_ranks in zip(expected, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(of_ranks, -1), whole)


def test_the_kernels_are_used_with_cuda(plugin, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launched = []
    launch = lambda *given, **options: launched.append((given, options))  # noqa: E731
    plugin.gate(launch, *"abcd", do_add=True)
    plugin.sums_of_squares(launch, *"ab")
    plugin.normalise(launch, *"abcde", 2, 1e-3)
    assert launched == [
        (tuple("abcd"), {"do_add": True}),
        (tuple("ab"), {}),
        ((*"abcde", 2, 1e-3), {}),
    ]
