"""Core attention over packed sequences without TransformerEngine.

Input: query, key and value of shape [T, heads of this rank, head_dim], and the boundaries of the
sequences in T. Output: [T, heads x head_dim]. The heads of the value may have another width than
those of query and key; the output has it too. Attention is causal within each sequence; ``varlen``
has the kernels.

With context parallelism this rank holds two chunks of each sequence (see ``packing``). The keys and
values of all ranks are gathered in one collective, and each chunk attends to the preceding tokens.
"""

from __future__ import annotations

from enum import Enum

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from rlpost.trainer import device
from rlpost.trainer.norm import ShardedByHead
from rlpost.trainer.varlen import SequenceBounds, attend, flash, has_flash, zigzag


class PackedAttention(ShardedByHead, MegatronModule):
    """Causal grouped-query attention over packed sequences.

    Replaces Megatron's DotProductAttention, which rejects packed input.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *args: object,
        softmax_scale: float | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and config.attention_dropout == 0.0
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.group = parallel_state.get_context_parallel_group()
        self.window = _window(config, layer_number)
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // self.tensor_group.size()
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(num_heads, dtype=config.params_dtype, device=device.current())
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Enum | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        packed, size = packed_seq_params, self.group.size()
        if size == 1:
            bounds = SequenceBounds(
                packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
            )
        else:
            both = torch.cat([key, value], dim=-1)
            # backward: reduce-scatter
            gathered = gather_from_sequence_parallel_region(both, group=self.group)
            rows, bounds = zigzag(
                packed.cu_seqlens_q,
                rank=self.group.rank(),
                size=size,
                num_local=query.size(0),
                max_length=packed.max_seqlen_q,
            )
            key, value = gathered[rows].split([key.size(-1), value.size(-1)], dim=-1)
        sinks = getattr(self, "softmax_offset", None)
        if sinks is None and self.window is None:
            return attend(query, key, value, bounds, scale=self.scale).flatten(1)
        return attend_windowed(
            query, key, value, bounds, scale=self.scale, window=self.window, sinks=sinks
        ).flatten(1)


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many keys a query of this layer sees, itself included; None for all."""
    if config.window_size is None or not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    return config.window_size[0] + 1


BLOCK = 256
"""Queries that are computed at once."""


def attend_windowed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SequenceBounds,
    *,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute causal attention of each sequence with a window and sinks.

    ``window`` is the number of keys that a query sees, itself included; None for all. ``sinks`` is
    [heads]: each joins the denominator of the softmax and has no value (gpt-oss, arXiv 2508.10925,
    section 2.2; the idea is from arXiv 2309.17453). Other arguments are those of ``varlen.attend``.

    On a GPU, FlashAttention computes both in 16 bits. Elsewhere queries are computed in blocks: the
    memory of a layer with a window grows with the length of the row, else with its square.
    """
    if has_flash(query):
        return flash(query, key, value, bounds, scale=scale, window=window, sinks=sinks)
    outputs = []
    queries = query.split(bounds.queries.diff().tolist())
    starts = bounds.keys.tolist()
    for number, sequence_queries in enumerate(queries):
        keys = key[starts[number] : starts[number + 1]]
        values = value[starts[number] : starts[number + 1]]
        position = keys.size(0) - sequence_queries.size(0)  # of the first query
        for block in sequence_queries.split(BLOCK):
            end = position + block.size(0)
            begin = 0 if window is None else max(0, position - window + 1)
            outputs.append(
                _block(
                    block,
                    keys[begin:end],
                    values[begin:end],
                    scale=scale,
                    window=window,
                    sinks=sinks,
                )
            )
            position = end
    return torch.cat(outputs)


def _block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of consecutive queries; the last query has the position of the last key."""
    rows, heads, width = query.shape
    groups = key.size(1)
    grouped = query.view(rows, groups, heads // groups, width)
    scores = torch.einsum("qgrd,kgd->grqk", grouped, key).float() * scale
    distance = torch.arange(key.size(0) - rows, key.size(0), device=query.device)[:, None]
    distance = distance - torch.arange(key.size(0), device=query.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().view(groups, -1, 1, 1))
    weights = (scores - total).exp().to(value.dtype)
    return torch.einsum("grqk,kgd->qgrd", weights, value).reshape(rows, heads, -1)
