"""Attention of a batch of single tokens on a CPU, as a plugin of SGLang. See ../README.md.

SGLang's attention in plain torch reads the cache and attends for one request after the other, in
each layer. With 128 requests this takes five sixths of the time of a token. This plugin attends for
all requests of a similar length at once.

It becomes unnecessary when ``torch_native`` batches requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None,
    before: int | None,
) -> torch.Tensor:
    """Attention of the last token of each request to its whole sequence.

    Args:
        query: [requests, heads, width].
        key: [places, groups, width], the cache.
        value: [places, groups, width of a value].
        places: [requests, longest]: the places of a request's tokens in the cache; those beyond its
            length may have any value.
        lengths: [requests].
        scale: factor of the scores; None for 1 / sqrt(width).
        before: number of tokens before the last one that it attends to; None for all.

    Returns:
        [requests, heads, width of a value].
    """
    positions = torch.arange(places.shape[1])
    seen = positions < lengths[:, None]
    if before is not None:
        seen &= positions >= lengths[:, None] - 1 - before
    # Not any place: 0 times what nobody wrote may be NaN.
    last = places.gather(1, (lengths[:, None] - 1).long())
    kept = places.where(seen, last)
    # the heads of a group are the rows that attend to its keys
    rows = query.unflatten(1, (key.shape[1], -1))
    out = scaled_dot_product_attention(
        rows,
        key[kept].transpose(1, 2).to(query.dtype),
        value[kept].transpose(1, 2).to(query.dtype),
        attn_mask=seen[:, None, None],
        scale=scale,
    )
    return out.flatten(1, 2)


def forward(
    one_by_one: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window_size: int | None = None,
    **more: Any,
) -> torch.Tensor:
    """Write the attention of a batch to ``output``; the arguments are those of SGLang's method.

    Args:
        one_by_one: SGLang's method, used with an encoder.
    """
    if encoder_lens is not None:
        tensors = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        windowed = {"scaling": scaling, "sliding_window_size": sliding_window_size}
        return one_by_one(backend, *tensors, encoder_lens, **windowed, **more)
    before = None if sliding_window_size is None or sliding_window_size < 0 else sliding_window_size
    # Powers of two: the padding of a batch is at most its content.
    sizes = torch.frexp(seq_lens.float()).exponent
    for size in sizes.unique():
        chosen = (sizes == size).nonzero()[:, 0]
        lengths = seq_lens[chosen]
        places = req_to_token[req_pool_indices[chosen], : int(lengths.max())]
        output[chosen] = attend(
            query[chosen], k_cache, v_cache, places, lengths, scale=scaling, before=before
        )
    return output


def register() -> None:
    """Register the plugin; SGLang calls this in each of its processes."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_decode", forward, HookType.AROUND)
