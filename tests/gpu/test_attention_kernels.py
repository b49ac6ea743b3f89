"""The attention kernels of the device, compared with the formula."""

from __future__ import annotations

import importlib
import time

import pytest
import torch
import torch.nn.functional as F

from rlpost.trainer.attention import attend_windowed
from rlpost.trainer.delta_rule import delta_rule, gated_delta_rule, kernels
from rlpost.trainer.varlen import attend, zigzag
from tests.unit.trainer.test_varlen import SCALE, bounds_of, formula, rows, starts_of
from tests.unit.trainer.test_windowed import formula as windowed_formula

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LENGTHS = [1, 17, 300, 64, 129]
WIDTHS = [(64, 64), (128, 128), (192, 128), (256, 256)]
"""Widths of a key and of a value: those of most models, of latent attention, and of Gemma-3."""


def near(found, wanted, dtype):
    return (found.float() - wanted.float()).abs().max() <= TOLERANCE[dtype] * max(
        1.0, wanted.abs().max().item()
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_over_packed_sequences_equals_the_formula(device, dtype):
    """Output and gradients, with grouped queries, for sequences of very different lengths."""
    torch.manual_seed(1)
    tensors = [rows(sum(LENGTHS), heads, dtype, device) for heads in (4, 2, 2)]
    wide = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    ours = attend(*tensors, bounds_of(LENGTHS, device), scale=SCALE)
    expected = torch.cat(
        [formula(*part) for part in zip(*(tensor.split(LENGTHS) for tensor in wide), strict=True)]
    )
    assert ours.device.type == device and ours.dtype == dtype
    assert near(ours.cpu(), expected, dtype)
    upstream = torch.randn_like(ours)
    found = torch.autograd.grad(ours, tensors, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.cpu().double())
    assert all(near(one.cpu(), other, dtype) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_chunk_sees_all_keys_up_to_its_own_end(device, dtype):
    """There are more keys than queries.

    This is what each of two context-parallel ranks attends to, in one call.
    """
    torch.manual_seed(1)
    lengths, size = [8, 132, 64], 2
    starts = starts_of(lengths).to(device)
    # as gathered from both ranks
    key, value = (rows(sum(lengths), 2, dtype, device) for _ in range(2))
    for rank in range(size):
        query = rows(sum(lengths) // size, 4, dtype, device)
        seen, bounds = zigzag(
            starts, rank=rank, size=size, num_local=len(query), max_length=max(lengths)
        )
        ours = attend(query, key[seen], value[seen], bounds, scale=SCALE)
        queries, keys = bounds.queries.diff().tolist(), bounds.keys.diff().tolist()
        parts = zip(
            query.split(queries), key[seen].split(keys), value[seen].split(keys), strict=True
        )
        expected = torch.cat(
            [formula(*(tensor.double().cpu() for tensor in part)) for part in parts]
        )
        assert near(ours.cpu(), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_and_sinks_equal_the_formula(device, dtype, window, has_sinks):
    """Output and gradients, also of the sinks."""
    torch.manual_seed(1)
    leaves = [rows(sum(LENGTHS), heads, dtype, device) for heads in (4, 2, 2)]
    if has_sinks:
        leaves.append(torch.randn(4, dtype=dtype, device=device, requires_grad=True))
    wide = [tensor.detach().double().cpu().requires_grad_() for tensor in leaves]
    sinks, wide_sinks = (each[3] if has_sinks else None for each in (leaves, wide))
    ours = attend_windowed(
        *leaves[:3], bounds_of(LENGTHS, device), scale=SCALE, window=window, sinks=sinks
    )
    parts = zip(*(tensor.split(LENGTHS) for tensor in wide[:3]), strict=True)
    expected = torch.cat([windowed_formula(*part, window, wide_sinks) for part in parts])
    assert near(ours.cpu(), expected, dtype)
    upstream = torch.randn_like(ours)
    found = torch.autograd.grad(ours, leaves, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.cpu().double())
    assert all(near(one.cpu(), other, dtype) for one, other in zip(found, wanted, strict=True))


@pytest.mark.needs("transformer-engine", cuda=True)
@pytest.mark.parametrize("shares_rows", [False, True])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_transformer_engine_attends_to_packed_rows_of_every_width(
    device, widths, shares_rows, record_property
):
    """cuDNN or flash-attn; which of them has a kernel cannot be read.

    ``shares_rows``: a sequence has queries for its last tokens alone, as with --share-prefix.
    """
    attention = importlib.import_module("transformer_engine.pytorch").DotProductAttention
    torch.manual_seed(1)
    heads, groups = (4, 4) if widths[0] != widths[1] else (4, 2)
    queries = [1 + length // 3 for length in LENGTHS] if shares_rows else LENGTHS
    shapes = [
        (sum(queries), heads, widths[0]),
        (sum(LENGTHS), groups, widths[0]),
        (sum(LENGTHS), groups, widths[1]),
    ]
    tensors = [
        torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for shape in shapes
    ]
    wide = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    of_queries, of_keys = (starts_of(each).to(device).int() for each in (queries, LENGTHS))
    made = attention(
        heads,
        widths if widths[0] != widths[1] else widths[0],
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right" if shares_rows else "padding_causal",
        softmax_scale=SCALE,
    )
    ours = made(
        *tensors,
        cu_seqlens_q=of_queries,
        cu_seqlens_kv=of_keys,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    ).view(sum(queries), heads, widths[1])
    lengths = (queries, LENGTHS, LENGTHS)
    parts = zip(
        *(tensor.split(each) for tensor, each in zip(wide, lengths, strict=True)), strict=True
    )
    expected = torch.cat([formula(*part) for part in parts])
    assert near(ours.cpu(), expected, torch.bfloat16)
    upstream = torch.randn_like(ours)
    found = torch.autograd.grad(ours, tensors, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.cpu().double())
    assert all(
        near(one.cpu(), other, torch.bfloat16) for one, other in zip(found, wanted, strict=True)
    )


def test_linear_attention_equals_the_formula_in_float32(device, record_property):
    """By kernels if flash-linear-attention is installed; output and gradients."""
    torch.manual_seed(1)
    total, heads, width = sum(LENGTHS), 4, 64
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key = (
        F.normalize(torch.randn(total, 2, width, device=device), dim=-1) for _ in range(2)
    )
    value = torch.randn(total, heads, width, device=device).to(dtype)
    decay, beta = (torch.rand(total, heads, device=device) for _ in range(2))
    inputs = [each.requires_grad_() for each in (query, key, value, -decay, beta)]
    starts = starts_of(LENGTHS).to(device).int()
    wide = [each.detach().double().cpu().float().requires_grad_() for each in inputs]
    query, key = (each.repeat_interleave(2, dim=1) for each in wide[:2])
    expected = gated_delta_rule(query, key, *wide[2:], starts.cpu())
    ours = delta_rule(*inputs, starts)
    assert ours.dtype == dtype and near(ours.cpu(), expected, dtype)
    upstream = torch.randn_like(ours)
    found = torch.autograd.grad(ours, inputs, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.cpu().float())
    assert all(near(one.cpu(), other, dtype) for one, other in zip(found, wanted, strict=True))
    name = "torch" if kernels() is None else "flash-linear-attention"
    record_property("figure", f"{name}, {milliseconds(lambda: delta_rule(*inputs, starts)):.2f} ms")
    assert device == "cpu" or name != "torch", "fla-core is not installed"


def milliseconds(act) -> float:
    """Return the time of a call, without the first ones."""
    times = []
    for _ in range(5):
        started = time.monotonic()
        act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    return 1e3 * min(times)
