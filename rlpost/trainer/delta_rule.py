"""The gated delta rule over packed sequences, in chunks: in torch, or by kernels on a GPU.

The state of a head is a matrix S [key_dim, value_dim], zero at the start of each sequence. Token t
decays it, corrects the value that it stores for its key, and reads it (Gated DeltaNet, arXiv
2412.06464, equation 10, here with keys as rows):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = S_t^T q_t

The chunked form computes C tokens with a few matrix products and passes only the state from chunk
to chunk (arXiv 2406.06484, section 3; with decay arXiv 2412.06464, section 3.3). A chunk never
crosses the end of a sequence: each sequence is padded with tokens that leave the state as it is.

On a GPU the kernels of flash-linear-attention (package fla-core) compute the same where they are
installed: tests/contract/test_triton_kernels.py compares both in Triton's interpreter. torch launches
some five kernels for each chunk.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

CHUNK = 64
"""Tokens of a chunk."""
WIDEST_KEY = 256
"""Largest key_dim of the kernels (``ops/common/chunk_delta_h.py`` of fla-core 0.6.0)."""

Kernels = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@functools.cache
def kernels() -> Kernels | None:
    """Return the kernels of flash-linear-attention; None without CUDA or the package."""
    if not torch.cuda.is_available():
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        logger.warning(
            "no kernels of fla-core (%s): linear attention is computed in torch, several kernels for "
            "every %d tokens",
            error,
            CHUNK,
        )
        return None
    return chunk_gated_delta_rule


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Compute the outputs of all tokens, by kernels if there are any.

    Args:
        query: [T, key heads, key_dim], already scaled.
        key: the same shape, of length 1. The value heads of a key head are consecutive.
        value: [T, heads, value_dim].
        decay: [T, heads], g above; at most 0.
        beta: [T, heads], between 0 and 1.
        starts: [N + 1], start of each sequence, then T.

    Returns:
        [T, heads, value_dim], with the dtype of ``value``.
    """
    fused = kernels() if key.size(-1) <= WIDEST_KEY else None
    if fused is None:
        repeats = value.size(1) // key.size(1)
        query, key = (each.repeat_interleave(repeats, dim=1) for each in (query, key))
        return gated_delta_rule(query, key, value, decay, beta, starts).to(value.dtype)
    query, key = query.to(value.dtype), key.to(value.dtype)
    rows = (each.unsqueeze(0) for each in (query, key, value, decay, beta))
    output, _ = fused(*rows, scale=1.0, cu_seqlens=starts)
    return output.squeeze(0)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor,
    *,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute the outputs of all tokens in torch, in float32.

    Args:
        query: [T, heads, key_dim], already scaled.
        key: the same shape, of length 1.
        value: [T, heads, value_dim].
        decay: [T, heads], g above; at most 0.
        beta: [T, heads], between 0 and 1.
        starts: [N + 1], start of each sequence, then T.
        chunk: tokens of a chunk.

    Returns:
        [T, heads, value_dim] float32.
    """
    place, is_first = _chunks_of(starts, chunk)
    num_chunks = len(is_first)

    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        """[T, heads, ...] -> [chunks, heads, C, ...], zero at padding."""
        padded = tensor.new_zeros(num_chunks * chunk, *tensor.shape[1:], dtype=torch.float32)
        padded = padded.index_copy(0, place, tensor.float())
        return padded.unflatten(0, (num_chunks, chunk)).transpose(1, 2)

    q, k, v = chunked(query), chunked(key), chunked(value)
    total, weight = chunked(decay).cumsum(-1), chunked(beta).unsqueeze(-1)
    is_after = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    between = total.unsqueeze(-1) - total.unsqueeze(-2)  # decay from column to row
    between = between.masked_fill(~is_after, float("-inf")).exp()
    grown = total.exp().unsqueeze(-1)
    # (1 + A) x = rhs, A strictly lower: what each token corrects, given the tokens before it
    lower = (weight * k) @ k.mT * between
    rhs = torch.cat([weight * v, weight * k * grown], dim=-1)
    solved = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
    values, state_keys = solved.split([v.size(-1), k.size(-1)], dim=-1)
    scores = q @ k.mT * between
    read = q * grown
    last = total[..., -1:]
    written = (k * (last - total).exp().unsqueeze(-1)).mT
    kept = last.exp().unsqueeze(-1)

    state = q.new_zeros(q.size(1), q.size(-1), v.size(-1))
    outputs = []
    for number, first in enumerate(is_first):
        if first:
            state = torch.zeros_like(state)
        correction = values[number] - state_keys[number] @ state
        outputs.append(read[number] @ state + scores[number] @ correction)
        state = kept[number] * state + written[number] @ correction
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1).index_select(0, place)


def _chunks_of(starts: torch.Tensor, chunk: int) -> tuple[torch.Tensor, list[bool]]:
    """Return the position of each token among the tokens of all chunks, [T].

    Also return for each chunk whether a sequence starts with it.
    """
    lengths = starts.diff()
    chunks = (lengths + chunk - 1) // chunk
    before = F.pad(chunks.cumsum(0), (1, 0))[:-1] * chunk
    shift = (before - starts[:-1]).repeat_interleave(lengths)
    place = torch.arange(len(shift), device=starts.device) + shift
    is_first = [number == 0 for count in chunks.tolist() for number in range(count)]
    return place, is_first


def short_convolution(
    channels: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Convolve each channel with the tokens before it in its sequence.

    Args:
        channels: [T, C].
        weight: [C, K]; the last tap is the token itself.
        starts: [N + 1], start of each sequence, then T.

    Returns:
        [T, C].
    """
    taps = weight.size(-1)
    first = starts[:-1].repeat_interleave(starts.diff())
    position = torch.arange(len(channels), device=channels.device) - first
    output = channels * weight[:, -1]
    for back in range(1, min(taps, len(channels))):
        earlier = F.pad(channels, (0, 0, back, 0))[:-back]
        earlier = earlier * (position >= back).unsqueeze(-1)
        output = output + earlier * weight[:, taps - 1 - back]
    return output
