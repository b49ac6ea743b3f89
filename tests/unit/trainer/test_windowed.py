"""Windows and sinks compared with the formula over a whole sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rlpost.trainer import attention
from rlpost.trainer.attention import attend_windowed
from tests.unit.trainer.test_varlen import GROUPS, HEADS, SCALE, bounds_of, rows

LENGTHS = [1, 7, 4]


def formula(query, key, value, window, sinks):
    """Softmax over the scores in the window and the sink of the head, which has no value."""
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    if window is not None:
        seen &= ~seen.tril(-window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def scores_of(query, key, starts_q, starts_k, scale, left, right):
    """Yield (queries, keys, scores) of each sequence, -inf outside of the window.

    The last query is at the place of the last key. ``left`` and ``right`` are the keys seen before
    and after a query's own, -1 for all (FlashAttention's README, "window_size").
    """
    for (start_q, end_q), (start_k, end_k) in zip(
        pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True
    ):
        q, k = slice(start_q, end_q), slice(start_k, end_k)
        repeated = key[k].repeat_interleave(query.size(1) // key.size(1), dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[q], repeated) * scale
        shift = scores.size(2) - scores.size(1)
        ones = torch.ones_like(scores, dtype=torch.bool)
        seen = ones if right < 0 else ones.tril(shift + right)
        seen = seen if left < 0 else seen & ones.triu(shift - left)
        yield q, k, scores.masked_fill(~seen, -torch.inf)


def flash_forward(query, key, value, starts_q, starts_k, max_q, max_k, *_, **options):
    """FlashAttention-2, algorithm 1: the output and the logarithm of the softmax's denominator."""
    window = options["window_size_left"], options["window_size_right"]
    output, total = torch.empty_like(query), query.new_empty(query.size(1), len(query)).float()
    for q, k, scores in scores_of(query, key, starts_q, starts_k, options["scale"], *window):
        repeated = value[k].repeat_interleave(query.size(1) // key.size(1), dim=1)
        output[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), repeated)
        total[:, q] = scores.logsumexp(-1)
    return output, total, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def flash_backward(
    gradient, query, key, value, output, total, starts_q, starts_k, *_, scale, **options
):
    """FlashAttention-2, algorithm 2: reads the output and ``total``, and no other result."""
    window = options["window_size_left"], options["window_size_right"]
    groups, repeats = key.size(1), query.size(1) // key.size(1)
    found = [torch.zeros_like(each) for each in (query, key, value)]
    for q, k, scores in scores_of(query, key, starts_q, starts_k, scale, *window):
        wide_key, wide_value = (each[k].repeat_interleave(repeats, dim=1) for each in (key, value))
        weights = (scores - total[:, q, None]).exp()
        dot = (gradient[q] * output[q]).sum(-1).T
        of_weights = torch.einsum("qhd,khd->hqk", gradient[q], wide_value)
        of_scores = weights * (of_weights - dot[..., None]) * scale
        found[0][q] = torch.einsum("hqk,khd->qhd", of_scores, wide_key)
        for into, by_head in (
            (found[1], torch.einsum("hqk,qhd->khd", of_scores, query[q])),
            (found[2], torch.einsum("hqk,qhd->khd", weights, gradient[q])),
        ):
            into[k] = by_head.unflatten(1, (groups, repeats)).sum(2)
    return tuple(found)


@pytest.fixture(scope="module")
def flash_on_cpu():
    """Register both operators for tensors on the CPU, for which torch has none."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", flash_forward, "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        yield


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kernel", ["blocks", "flash"])
def test_each_sequence_has_its_window_and_its_sinks(
    monkeypatch, request, kernel, window, has_sinks
):
    """Output and all gradients; blocks of 2 queries, so that sequences have several.

    ``flash``: the kernel's algorithm, in place of its two operators on a GPU.
    """
    monkeypatch.setattr(attention, "BLOCK", 2)
    if kernel == "flash":
        monkeypatch.setattr(attention, "has_flash", lambda query: True)
        request.getfixturevalue("flash_on_cpu")
    torch.manual_seed(3)
    inputs = [rows(sum(LENGTHS), heads, torch.float32) for heads in (HEADS, GROUPS, GROUPS)]
    sinks = torch.randn(HEADS, requires_grad=True) if has_sinks else None
    ours = attend_windowed(*inputs, bounds_of(LENGTHS), scale=SCALE, window=window, sinks=sinks)
    parts = zip(*(each.split(LENGTHS) for each in inputs), strict=True)
    expected = torch.cat([formula(*part, window, sinks) for part in parts])
    torch.testing.assert_close(ours, expected)
    leaves = [*inputs, *([sinks] if has_sinks else [])]
    weight = torch.randn_like(expected)
    found, wanted = (
        torch.autograd.grad((each * weight).sum(), leaves) for each in (ours, expected)
    )
    torch.testing.assert_close(found, wanted)
