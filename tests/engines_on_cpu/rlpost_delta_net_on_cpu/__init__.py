"""Linear attention (gated delta net) in plain torch, as a plugin of SGLang. See ../README.md.

On a CPU the layers of Qwen3-Next and Qwen3.5 call kernels of ``sgl_kernel``, and without AMX Triton
kernels for the norm with a gate. Here they are functions with the names and arguments of those
kernels. The delta rule is the recurrence, one token after the other (arXiv 2412.06464, equation 10).

``conv_states`` [slots, channels, taps - 1] and ``states`` [slots, heads, value width, key width] are
SGLang's memory of all requests; functions update the slots of their batch in place.

It becomes unnecessary when there is a wheel of ``sgl_kernel`` for CPUs without AMX.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
NORMS = "sglang.kernels.ops.attention.fla"


def causal_conv1d_fn_cpu(
    channels: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_others: object,
) -> Tensor:
    """Convolve the tokens of prompts, [channels, tokens], after the state in each one's slot."""
    outputs = []
    starts = query_start_loc.tolist()
    for number, slot in enumerate(cache_indices.tolist()):
        new = channels[:, starts[number] : starts[number + 1]]
        before = conv_states[slot].to(new.dtype)
        if not has_initial_state[number]:
            before = torch.zeros_like(before)
        outputs.append(_convolved(torch.cat([before, new], 1), weight, bias, activation))
        conv_states[slot] = torch.cat([before, new], 1)[:, -before.size(1) :]
    return torch.cat(outputs, 1)


def causal_conv1d_update_cpu(
    channels: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_others: object,
) -> Tensor:
    """Convolve one token of each request, [requests, channels]."""
    slots = conv_state_indices.long()
    whole = torch.cat([conv_states[slots].to(channels.dtype), channels.unsqueeze(-1)], -1)
    conv_states[slots] = whole[..., 1:].to(conv_states.dtype)
    output = (whole * weight).sum(-1)
    output = output if bias is None else output + bias
    return F.silu(output) if activation else output


def _convolved(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    output = F.conv1d(tokens[None], weight.unsqueeze(1), bias, groups=len(tokens))[0]
    return F.silu(output) if activation else output


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_others: object,
) -> tuple[Tensor, None, None]:
    """Attention of the tokens of prompts, [1, tokens, heads, value width].

    Args:
        q: [1, tokens, key heads, key width], as projected.
        k: the same shape.
        v: [1, tokens, heads, value width].
        g: [1, tokens, heads], logarithm of the decay.
        beta: the same shape.
        initial_state: ``states``.
        initial_state_indices: the slot of each request.
        cu_seqlens: the first token of each request, then the number of tokens.
    """
    query, key = _prepared(q[0], k[0], heads=v.size(2))
    output = torch.empty_like(v[0], dtype=torch.float32)
    starts = cu_seqlens.tolist()
    for number, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for token in range(starts[number], starts[number + 1]):
            state = _next(state, key[token], v[0, token], g[0, token], beta[0, token])
            output[token] = _read(state, query[token])
        initial_state[slot] = state.to(initial_state.dtype)
    return output.to(v.dtype)[None], None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_others: object,
) -> Tensor:
    """Attention of one token of each request, [1, requests, heads, value width].

    Args:
        A_log: [heads], of the decay.
        dt_bias: [heads].
        q: [1, requests, key heads, key width]; ``k`` and ``v`` as in the function above.
        a: [requests, heads], of the decay; ``b``: of the correction.
        initial_state_source: ``states``.
        initial_state_indices: the slot of each request.
    """
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    query, key = _prepared(q[0], k[0], heads=v.size(2))
    slots = initial_state_indices.long()
    state = initial_state_source[slots].float()
    state = _next(state, key, v[0], g[0], beta[0])
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return _read(state, query).to(v.dtype)[None]


def _prepared(query: Tensor, key: Tensor, *, heads: int) -> tuple[Tensor, Tensor]:
    """Normalise rows to length 1, scale queries, repeat both for each value head; float32."""

    def unit(rows: Tensor) -> Tensor:
        wide = rows.float()
        return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)

    times = heads // query.size(-2)
    query, key = (unit(rows).repeat_interleave(times, -2) for rows in (query, key))
    return query * query.size(-1) ** -0.5, key


def _next(state: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S <- exp(g) S, corrected by beta (v - S k) k^T."""
    state = state * g.float().exp()[..., None, None]
    correction = (value.float() - _read(state, key)) * beta.float().unsqueeze(-1)
    return state + correction.unsqueeze(-1) * key.unsqueeze(-2)


def _read(state: Tensor, row: Tensor) -> Tensor:
    return (state @ row.unsqueeze(-1)).squeeze(-1)


def fused_gdn_gating_cpu(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay, and the factor of the correction: [1, tokens, heads] float32."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split into queries, keys and values; the gate [tokens, heads, width]; ``b``; and ``a``."""
    values = value_heads * value_width
    mixed, gate = qkvz.split([2 * key_heads * key_width + values, values], -1)
    b, a = ba.split(value_heads, -1)
    gate = gate.reshape(-1, value_heads, value_width)
    return mixed.contiguous(), gate, b.contiguous(), a.contiguous()


def fused_qk_gemma_rmsnorm_cpu(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    """Norms of each head, with the factor 1 + weight."""
    pairs = ((query, query_weight), (key, key_weight))
    first, second = (
        F.rms_norm(rows.reshape(-1, width).float(), (width,), 1 + weight.float(), eps).to(
            rows.dtype
        )
        for rows, weight in pairs
    )
    return first, second


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    gated: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    width: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like the function above, for rows in which the gate of each head follows its query."""
    query, gate = gated.reshape(-1, heads, 2 * width).chunk(2, -1)
    normed = fused_qk_gemma_rmsnorm_cpu(query, key, query_weight, key_weight, eps, width)
    return *normed, gate.contiguous()


def fused_sigmoid_mul_cpu(output: Tensor, gate: Tensor) -> None:
    """Multiply with the gate, in place."""
    output.mul_(gate.reshape(output.shape).sigmoid())


def norm_with_gate(
    launch: Callable[..., Tensor],
    rows: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    *,
    eps: float,
    **others: Any,
) -> Tensor:
    """Norm of each row, times weight and the activation of its gate (Qwen3-Next).

    ``launch`` is SGLang's function, which is not called; the other arguments are its own.
    """
    normed = F.rms_norm(rows.float(), rows.shape[-1:], weight.float(), eps)
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    return (normed * act(gate.float())).to(rows.dtype)


def gated_norm(
    launch: Callable[..., Tensor],
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    z: Tensor,
    eps: float,
    activation: str = "swish",
    **others: Any,
) -> Tensor:
    """Like ``norm_with_gate``, with the arguments that Qwen3.5 uses."""
    return norm_with_gate(launch, rows, z, weight, bias, activation, eps=eps)


KERNELS = (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_sigmoid_mul_cpu,
)
"""Functions that SGLang takes from ``torch.ops.sgl_kernel``."""


def provide_kernels() -> None:
    """Make ``from sgl_kernel.mamba import NAME`` import functions of this module."""
    sys.modules.setdefault("sgl_kernel.mamba", sys.modules[__name__])


def register() -> None:
    """Register the plugin; SGLang calls this in each of its processes."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # By default the state of the convolution would be stored in bfloat16.
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    provide_kernels()
    for kernel in KERNELS:
        known = getattr(torch.ops.sgl_kernel, kernel.__name__, None)
        if not isinstance(known, torch._ops.OpOverloadPacket):  # none, or one that refuses
            setattr(torch.ops.sgl_kernel, kernel.__name__, kernel)
    around = HookType.AROUND
    HookRegistry.register(f"{NORMS}.fused_norm_gate.rms_norm_gated", norm_with_gate, around)
    HookRegistry.register(f"{NORMS}.layernorm_gated.layernorm_fn", gated_norm, around)
