"""Attention over packed sequences of variable length, with the device's fastest kernel.

Pure torch.

Input: query [Tq, heads, head_dim], key [Tk, groups, head_dim], value [Tk, groups, value_dim], and
the start of each sequence in both. Output: [Tq, heads, value_dim]. Attention is causal within each
sequence, and aligned at its end: the last query has the position of the last key. If a sequence has
fewer queries than keys, its queries are the last positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

BOTTOM_RIGHT = 2
"""The causal mask of aten's memory-efficient kernel that is aligned to the last query and key."""


@dataclass(frozen=True, slots=True)
class SequenceBounds:
    """Bounds of S sequences."""

    queries: torch.Tensor  # [S + 1] int32, start of each sequence among the queries, then the end
    keys: torch.Tensor  # [S + 1] int32, the same among the keys
    max_queries: int  # of the longest sequence
    max_keys: int


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SequenceBounds,
    *,
    scale: float,
) -> torch.Tensor:
    """Compute softmax(query key^T scale) value in each sequence.

    The attention is causal, and grouped-query if groups < heads.

    On a GPU one kernel processes all sequences: FlashAttention for 16-bit dtypes, torch's
    memory-efficient kernel for float32. On a CPU there is one call per sequence, which is faster
    than a mask over the whole row.
    """
    if has_flash(query):
        return flash(query, key, value, bounds, scale=scale)
    if query.is_cuda:
        return _memory_efficient(query, key, value, bounds, scale=scale)
    parts = (
        tensor.split(starts.diff().tolist())
        for tensor, starts in ((query, bounds.queries), (key, bounds.keys), (value, bounds.keys))
    )
    return torch.cat([_one_sequence(q, k, v, scale) for q, k, v in zip(*parts, strict=True)])


def has_flash(query: torch.Tensor) -> bool:
    """Return whether torch's FlashAttention computes attention with these queries."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SequenceBounds,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the attention of ``attend`` with torch's FlashAttention.

    ``window`` and ``sinks`` are those of ``attention.attend_windowed``.
    """
    from torch.nn.attention.varlen import varlen_attn  # torch >= 2.10; not needed on a CPU

    value_width = value.size(-1)
    # FlashAttention has one width for all three, and 8 divides it
    width = -8 * (-max(query.size(-1), value_width) // 8)
    query, key, value = (
        each if each.size(-1) == width else F.pad(each, (0, width - each.size(-1)))
        for each in (query, key, value)
    )
    # keys before the query (-1: all), and none after it
    window_size = (-1 if window is None else window - 1, 0)
    if sinks is not None:
        left, right = window_size
        options = {"scale": scale, "window_size_left": left, "window_size_right": right}
        output = _FlashWithSinks.apply(query, key, value, sinks, _FlashCall(bounds, options))
    else:
        output = varlen_attn(
            query,
            key,
            value,
            bounds.queries,
            bounds.keys,
            bounds.max_queries,
            bounds.max_keys,
            scale=scale,
            window_size=window_size,
            enable_gqa=query.size(1) != key.size(1),
        )
    assert isinstance(output, torch.Tensor)
    return output[..., :value_width]


@dataclass(frozen=True, slots=True)
class _FlashCall:
    """What forward and backward pass of FlashAttention are given besides tensors."""

    bounds: SequenceBounds
    options: dict[str, float]  # scale, and the window: keys before and after a query, -1 for all

    @property
    def arguments(self) -> tuple[torch.Tensor | float | bool, ...]:
        """Bounds, the probability of dropout, and whether all keys before a query are seen."""
        bounds, is_causal = self.bounds, self.options["window_size_left"] < 0
        return bounds.queries, bounds.keys, bounds.max_queries, bounds.max_keys, 0.0, is_causal


class _FlashWithSinks(torch.autograd.Function):
    """FlashAttention whose softmax has one more term, exp(sink of the head), without a value.

    With L = log sum_j exp(s_j) of a query and head, from the kernel, and the sink z:
    L' = log(exp(L) + exp(z)) and o' = exp(L - L') o. The kernel's backward pass reads logits only
    through P = exp(s - L) and D = <do, o> (FlashAttention-2, arXiv 2307.08691, algorithm 2), so
    that with L' and o' in place of L and o it returns the gradients of this softmax. The gradient
    of z is -exp(z - L') D', summed over queries, as its value is zero.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        call: _FlashCall,
    ) -> torch.Tensor:
        output, total, *random_state, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *call.arguments, return_debug_mask=False, **call.options
        )
        with_sink = torch.logaddexp(total, sinks.float().unsqueeze(-1))  # [heads, Tq]
        share = (total - with_sink).exp().mT.unsqueeze(-1)  # [Tq, heads, 1]
        output = (output.float() * share).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, with_sink, *random_state)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, with_sink, *random_state = ctx.saved_tensors
        (gradient,) = gradients
        input_gradients = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(),
            query,
            key,
            value,
            output,
            with_sink,
            *ctx.call.arguments,
            *random_state,
            **ctx.call.options,
        )
        dot = (gradient.float() * output.float()).sum(-1)  # [Tq, heads]
        weight = (sinks.float().unsqueeze(-1) - with_sink).exp().mT
        sink_gradients = -(weight * dot).sum(0).to(sinks.dtype)
        return (*input_gradients, sink_gradients, None)


def _memory_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SequenceBounds,
    *,
    scale: float,
) -> torch.Tensor:
    """The kernel that torch calls for jagged tensors; it does not support grouped queries."""
    if (repeats := query.size(1) // key.size(1)) > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    attention, *_ = torch.ops.aten._efficient_attention_forward(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        None,
        bounds.queries,
        bounds.keys,
        bounds.max_queries,
        bounds.max_keys,
        0.0,
        BOTTOM_RIGHT,
        compute_log_sumexp=True,
        scale=scale,
    )
    return attention.squeeze(0)


def _one_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    before = key.size(0) - query.size(0)
    mask = None
    if before:
        whole = torch.ones(query.size(0), key.size(0), dtype=torch.bool, device=query.device)
        mask = whole.tril(before)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    attention = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return attention.squeeze(0).transpose(0, 1)


def zigzag(
    starts: torch.Tensor, *, rank: int, size: int, num_local: int, max_length: int
) -> tuple[torch.Tensor, SequenceBounds]:
    """Find the keys that the chunks of context-parallel rank ``rank`` attend to (see ``packing``).

    Does not synchronise with the GPU.

    ``starts`` [N + 1] has the start of each sequence in the whole row; each length is a multiple of
    2 ``size`` tokens, and at most ``max_length``. Each of ``size`` ranks has ``num_local`` rows.

    Returns:
        Row indices into the concatenated rows of all ranks: the keys of each of the 2 N chunks, in
        sequence order; and the bounds of the chunks.
    """
    width, begins = starts.diff() // (2 * size), starts[:-1] // size
    # chunks up to and including this rank's own
    num_seen = torch.tensor([rank + 1, 2 * size - rank], device=starts.device)
    seen = (width[:, None] * num_seen).flatten()
    queries, keys = (
        F.pad(each.cumsum(0), (1, 0)).int() for each in (width.repeat_interleave(2), seen)
    )
    num_keys = (2 * size + 1) * num_local // 2
    which = torch.arange(len(seen), device=starts.device).repeat_interleave(
        seen, output_size=num_keys
    )
    place = torch.arange(num_keys, device=starts.device) - keys[which]
    own_width = width[which // 2]
    chunk = place // own_width
    is_second = chunk >= size  # the owner's second chunk
    owner = torch.where(is_second, 2 * size - 1 - chunk, chunk)
    rows = owner * num_local + begins[which // 2] + is_second * own_width + place % own_width
    longest = max_length // (2 * size)
    return rows, SequenceBounds(queries, keys, longest, longest * (2 * size - rank))
