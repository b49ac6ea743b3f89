"""Kernels whose rates ``rlpost plan`` assumes, timed; the summary has the predictions beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from rlpost.config.plan.cards import card_of
from rlpost.trainer import logprobs, parallel
from tests import predicted
from tests.contract.logprob_kernels import Group

REPEATS = 10
Timed = dict[str, Callable[[], object]]


def products(device: str, scale: int) -> Timed:
    rows = predicted.SIDE // scale
    left, right = (torch.randn(rows, rows, device=device).bfloat16() for _ in range(2))
    narrow = right[:, : predicted.NARROW // scale].contiguous()
    return {
        predicted.WIDE_PRODUCT: lambda: left @ right,
        predicted.NARROW_PRODUCT: lambda: left @ narrow,
    }


def attention(device: str, scale: int) -> Timed:
    shape = (1, predicted.HEADS, predicted.TOKENS // scale, predicted.HEAD)
    query, key, value = (
        torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    output = forward()
    upstream = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, (query, key, value), upstream, retain_graph=True)

    return {predicted.FORWARD: forward, predicted.BACKWARD: backward}


def log_probs(device: str, scale: int) -> Timed:
    num_rows, vocab = predicted.ROWS // scale, predicted.VOCAB // scale
    logits = torch.randn(num_rows, vocab, device=device).bfloat16().requires_grad_()
    index = torch.arange(num_rows, device=device)
    rows = logprobs.LogitRows(
        index, index % vocab, 1.0, num_valid=vocab, chunk_size=1024, fused=device == "cuda"
    )

    def both() -> object:
        return torch.autograd.grad(
            logprobs.response_logprobs(logits, rows, with_entropy=True)[0].sum(), logits
        )

    return {predicted.LOGPROBS: both}


def copies(device: str, scale: int) -> Timed:
    source = torch.ones(predicted.COPIED // scale, dtype=torch.uint8)
    target, other = source.to(device), source.to(device)
    host = source.pin_memory() if device == "cuda" else source
    return {
        predicted.MEMORY: lambda: target.copy_(other),
        predicted.HOST: lambda: target.copy_(host, non_blocking=True),
    }


def seconds_of(call: Callable[[], object]) -> float:
    """The least of some calls, by the device's clock."""
    call()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return min(found)


@pytest.mark.parametrize("make", [products, attention, log_probs, copies])
def test_kernels_take_the_time_that_the_plan_assumes(
    device: str,
    make: Callable[[str, int], Timed],
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No time fails a check; on a CPU they run once, in small."""
    monkeypatch.setattr(parallel, "tensor_parallel_group", lambda: Group(0, 1))
    for name, call in make(device, 1 if device == "cuda" else 64).items():
        if device == "cpu":
            call()
            continue
        measured, card = seconds_of(call), card_of(torch.cuda.get_device_name())
        if card is not None:
            record_property("compared", [name, predicted.kernel_seconds(card)[name], measured])
