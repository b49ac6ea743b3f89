"""Windows and sinks compared with the formula over a whole sequence."""

from __future__ import annotations

import pytest
import torch

from rlpost.actor import windowed
from rlpost.actor.windowed import attend_windowed
from tests.unit.actor.test_varlen import GROUPS, HEADS, SCALE, bounds_of, rows

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


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_each_sequence_has_its_window_and_its_sinks(monkeypatch, window, has_sinks):
    """Output and all gradients; blocks of 2 queries, so that sequences have several."""
    monkeypatch.setattr(windowed, "BLOCK", 2)
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
