"""Attention over sequences that stand one after another in one row, by the fastest kernel the device has. Pure torch.

In: query [Tq, heads, head_dim], key and value [Tk, groups, head_dim], where each sequence begins in both. Out: [Tq,
heads, head_dim]. A query sees the keys of its own sequence up to its own place, the last query of a sequence being at
the place of its last key; where a sequence has more keys than queries these are its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BOTTOM_RIGHT = 2  # the causal mask of aten's memory-efficient kernel that is aligned to the last query and key


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of S sequences."""

    queries: torch.Tensor  # [S + 1] int32, where each begins, and the end
    keys: torch.Tensor  # [S + 1] int32
    max_queries: int  # of a sequence
    max_keys: int


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, *, scale: float
) -> torch.Tensor:
    """softmax(query key^T scale) value in each sequence, causal; grouped-query when there are fewer groups than heads.

    On a GPU one kernel takes all sequences: FlashAttention for 16-bit numbers, torch's memory-efficient one for
    float32. On a CPU it is a call a sequence, which is faster there than a mask over the whole row.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, bounds, scale)
    if query.is_cuda:
        return _memory_efficient(query, key, value, bounds, scale)
    parts = (
        tensor.split(starts.diff().tolist())
        for tensor, starts in ((query, bounds.queries), (key, bounds.keys), (value, bounds.keys))
    )
    return torch.cat([_one_sequence(q, k, v, scale) for q, k, v in zip(*parts, strict=True)])


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, scale: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # torch >= 2.10; the CPU does without

    found = varlen_attn(
        query,
        key,
        value,
        bounds.queries,
        bounds.keys,
        bounds.max_queries,
        bounds.max_keys,
        scale=scale,
        window_size=(-1, 0),  # all before, none after
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(found, torch.Tensor)
    return found


def _memory_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, scale: float
) -> torch.Tensor:
    """What torch calls for jagged tensors; it knows no groups."""
    if (repeats := query.size(1) // key.size(1)) > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    found, *_ = torch.ops.aten._efficient_attention_forward(
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
    return found.squeeze(0)


def _one_sequence(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    before = key.size(0) - query.size(0)
    mask = None
    if before:
        mask = torch.ones(query.size(0), key.size(0), dtype=torch.bool, device=query.device).tril(before)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    found = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=query.size(1) != key.size(1)
    )
    return found.squeeze(0).transpose(0, 1)


def zigzag(
    starts: torch.Tensor, *, rank: int, size: int, num_local: int, max_length: int
) -> tuple[torch.Tensor, Bounds]:
    """What the chunks that context-parallel rank ``rank`` of ``size`` holds attend to (see ``packing``).

    Args: ``starts`` [N + 1], where each sequence begins in the whole row, each a multiple of 2 ``size`` tokens and at
    most ``max_length`` long; ``num_local`` rows on each rank. Returns rows among those of all ranks, one rank's after
    another's: the keys that each of the 2 N chunks sees, in the order of its sequence; and the bounds of the chunks.
    Nothing here waits for a GPU.
    """
    width, begins = starts.diff() // (2 * size), starts[:-1] // size
    num_seen = torch.tensor([rank + 1, 2 * size - rank], device=starts.device)  # chunks, up to the own one
    seen = (width[:, None] * num_seen).flatten()
    queries, keys = (F.pad(each.cumsum(0), (1, 0)).int() for each in (width.repeat_interleave(2), seen))
    num_keys = (2 * size + 1) * num_local // 2
    which = torch.arange(len(seen), device=starts.device).repeat_interleave(seen, output_size=num_keys)
    place = torch.arange(num_keys, device=starts.device) - keys[which]
    own_width = width[which // 2]
    chunk = place // own_width
    is_second = chunk >= size  # the owner's second chunk
    owner = torch.where(is_second, 2 * size - 1 - chunk, chunk)
    rows = owner * num_local + begins[which // 2] + is_second * own_width + place % own_width
    longest = max_length // (2 * size)
    return rows, Bounds(queries, keys, longest, longest * (2 * size - rank))
