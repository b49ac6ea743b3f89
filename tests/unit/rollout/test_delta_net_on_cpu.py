"""The plugin for linear attention on a CPU, compared with transformers' Qwen3-Next."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch.nn.functional import softplus
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from rlpost.extensions.on_cpu.engine import STAND_INS
from tests.unit.rollout.plugins import load_plugin

NAME = "rlpost_delta_net_on_cpu"
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 8, 12
LENGTHS, SLOTS = (7, 4), (3, 1)
"""Lengths and state slots of two requests; there are five slots."""


@pytest.fixture
def plugin() -> ModuleType:
    return load_plugin(NAME)


def inputs(length: int) -> dict[str, torch.Tensor]:
    """Random outputs of a layer's projections for one request."""
    return {
        "q": torch.randn(1, length, KEY_HEADS, KEY),
        "k": torch.randn(1, length, KEY_HEADS, KEY),
        "v": torch.randn(1, length, HEADS, VALUE),
        "a": torch.randn(length, HEADS),
        "b": torch.randn(length, HEADS),
    }


def packed(requests: list[dict[str, torch.Tensor]], rows: list[slice]) -> dict[str, torch.Tensor]:
    """Concatenate these rows of each request."""
    return {
        name: torch.cat(
            [one[name].select(0, 0)[at] if name in "qkv" else one[name][at] for one, at in pairs]
        )
        for name in "qkvab"
        if (pairs := list(zip(requests, rows, strict=True)))
    }


def expected(request: dict[str, torch.Tensor], a_log: torch.Tensor, bias: torch.Tensor):
    """Return outputs of a whole request and its final state [heads, key width, value width]."""
    decay = -a_log.exp() * softplus(request["a"] + bias)
    query, key = (request[name].repeat_interleave(HEADS // KEY_HEADS, 2) for name in "qk")
    output, state = reference.torch_chunk_gated_delta_rule(
        query,
        key,
        request["v"],
        g=decay[None],
        beta=request["b"].sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output[0], state[0]


def test_chunked_prompts_and_single_tokens_are_one_sequence(plugin):
    """Prompts in two chunks, then one token each, continue from their slots; others are kept."""
    torch.manual_seed(1)
    a_log, bias = torch.randn(HEADS), torch.randn(HEADS)
    requests = [inputs(length) for length in LENGTHS]
    states = torch.zeros(5, HEADS, VALUE, KEY)
    states[[0, 2, 4]] = 7.0
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    outputs: list[list[torch.Tensor]] = [[], []]
    for first, last in ((0, 2), (2, -1)):
        rows = [slice(first, last % length) for length in LENGTHS]
        counts = [at.stop - at.start for at in rows]
        given = packed(requests, rows)
        g, beta = plugin.fused_gdn_gating_cpu(a_log, given["a"], given["b"], bias)
        found, *_ = plugin.chunk_gated_delta_rule_cpu(
            **{name: given[name][None] for name in "qkv"},
            g=g,
            beta=beta,
            initial_state=states,
            initial_state_indices=slots,
            cu_seqlens=torch.tensor([0, counts[0], sum(counts)]),
            head_first=False,
        )
        for number, part in enumerate(found[0].split(counts)):
            outputs[number].append(part)
    given = packed(requests, [slice(length - 1, length) for length in LENGTHS])
    found = plugin.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=a_log,
        dt_bias=bias,
        **{name: given[name][None] for name in "qkv"},
        a=given["a"],
        b=given["b"],
        initial_state_source=states,
        initial_state_indices=slots,
    )
    for number, request in enumerate(requests):
        whole, state = expected(request, a_log, bias)
        ours = torch.cat([*outputs[number], found[0, number : number + 1]])
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[SLOTS[number]].mT, state, rtol=1e-5, atol=1e-6)
    assert (states[[0, 2, 4]] == 7.0).all()


def test_the_convolution_continues_where_a_request_stopped(plugin):
    torch.manual_seed(2)
    channels, taps = 6, 4
    weight = torch.randn(channels, taps)
    whole = [torch.randn(channels, length) for length in LENGTHS]
    memory = torch.full((5, channels, taps - 1), 7.0)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    outputs: list[list[torch.Tensor]] = [[], []]
    for first, last in ((0, 2), (2, -1)):
        parts = [one[:, first:last] for one in whole]
        counts = [part.size(1) for part in parts]
        found = plugin.causal_conv1d_fn_cpu(
            torch.cat(parts, 1),
            weight,
            None,
            activation="silu",
            conv_states=memory,
            has_initial_state=torch.tensor([first > 0] * 2),
            cache_indices=slots,
            query_start_loc=torch.tensor([0, counts[0], sum(counts)]),
            seq_lens_cpu=counts,
        )
        for number, part in enumerate(found.split(counts, 1)):
            outputs[number].append(part)
    token = torch.stack([one[:, -1] for one in whole])
    last = plugin.causal_conv1d_update_cpu(
        token, memory, weight, None, "silu", conv_state_indices=slots
    )
    for number, one in enumerate(whole):
        state = torch.zeros(1, channels, taps - 1)
        wanted = reference.torch_causal_conv1d_update(one[None], state, weight)
        ours = torch.cat([*outputs[number], last[number].unsqueeze(-1)], 1)
        torch.testing.assert_close(ours, wanted[0])
        torch.testing.assert_close(memory[SLOTS[number]], state[0])
    assert (memory[[0, 2, 4]] == 7.0).all()


def test_norms_are_those_of_transformers(plugin, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(3)
    rows, gate, weight = torch.randn(5, VALUE), torch.randn(5, VALUE), torch.randn(VALUE)
    norm = reference.Qwen3NextRMSNormGated(VALUE, eps=1e-3)
    norm.weight.data = weight
    expected_rows = norm(rows, gate).detach()
    found = plugin.norm_with_gate(None, rows, gate, weight, None, "silu", eps=1e-3)
    torch.testing.assert_close(found, expected_rows)
    found = plugin.gated_norm(None, rows, weight, None, z=gate, eps=1e-3, norm_before_gate=True)
    torch.testing.assert_close(found, expected_rows)

    gated, key, weights = (
        torch.randn(5, HEADS * 2 * KEY),
        torch.randn(5, 2 * KEY),
        torch.randn(2, KEY),
    )
    ours = plugin.fused_qk_gemma_rmsnorm_with_gate_cpu(gated, key, *weights, 1e-3, KEY, HEADS)
    query, gates = gated.view(5, HEADS, 2 * KEY).chunk(2, -1)
    for one, rows, of_norm in zip(ours, (query, key.view(5, 2, KEY)), weights, strict=False):
        norm = reference.Qwen3NextRMSNorm(KEY, eps=1e-3)
        norm.weight.data = of_norm
        torch.testing.assert_close(one, norm(rows).detach().reshape(-1, KEY))
    assert torch.equal(ours[2], gates)


def test_projections_are_split_in_their_order(plugin):
    values = HEADS * VALUE
    sizes = [2 * KEY_HEADS * KEY + values, values]
    qkvz, ba = torch.randn(3, sum(sizes)), torch.randn(3, 2 * HEADS)
    mixed, gate, b, a = plugin.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        qkvz, ba, KEY_HEADS, HEADS, KEY, VALUE
    )
    assert torch.equal(torch.cat([mixed, gate.flatten(1)], -1), qkvz)
    assert gate.shape == (3, HEADS, VALUE) and torch.equal(torch.cat([b, a], -1), ba)


def test_sglang_imports_the_kernels_by_name(plugin, monkeypatch):
    """``from sgl_kernel.mamba import ...`` finds the plugin's kernels."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in ("sgl_kernel", "sgl_kernel.mamba"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, NAME, plugin)
    plugin.provide_kernels()
    found = importlib.import_module("sgl_kernel.mamba")
    for name in (
        "causal_conv1d_fn_cpu",
        "causal_conv1d_update_cpu",
        "chunk_gated_delta_rule_cpu",
    ):
        assert getattr(found, name).__module__ == NAME
