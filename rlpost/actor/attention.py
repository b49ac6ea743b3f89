"""Core attention over packed sequences without TransformerEngine.

In: query, key, value of shape [T, heads of this rank, head_dim] and the boundaries of the sequences in T. Out:
[T, heads x head_dim]. Each token attends to those before it in its own sequence only. One scaled-dot-product call a
sequence: torch chooses the kernel, and the memory is linear in T wherever it has a fused one.

With context parallelism this rank holds two chunks of each sequence (see ``packing``); keys and values of all ranks are
gathered in one collective and each chunk attends to what precedes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule


class PackedAttention(MegatronModule):
    """Causal attention, grouped-query included. Stands where Megatron's DotProductAttention refuses packed input."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and config.attention_dropout == 0.0
        self.scale = config.kv_channels**-0.5
        self.group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        size = self.group.size()
        lengths = [length // size for length in packed_seq_params.cu_seqlens_q.diff().tolist()]
        if size == 1:
            parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
            return torch.cat([self._attend(*part) for part in parts]).flatten(1)
        both = torch.cat([key, value], dim=-1)
        gathered = gather_from_sequence_parallel_region(both, group=self.group)  # backward: reduce-scatter
        by_rank = gathered.unflatten(0, (size, -1)).split(lengths, dim=1)
        return torch.cat([self._attend_zigzag(*part) for part in zip(query.split(lengths), by_rank, strict=True)])

    def _attend_zigzag(self, query: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        """One sequence of which this rank holds two chunks: [2C, heads, head_dim] and the keys and values of all ranks
        [ranks, 2C, groups, 2 head_dim] -> [2C, heads x head_dim]. Each chunk sees all keys up to its own end."""
        rank, size, chunk = self.group.rank(), self.group.size(), query.size(0) // 2
        first, second = both.unflatten(1, (2, chunk)).unbind(1)
        in_order = torch.cat([first, second.flip(0)]).flatten(0, 1)  # chunk r, and chunk 2 ranks - 1 - r
        outputs = []
        for number, queries in zip((rank, 2 * size - 1 - rank), query.split(chunk), strict=True):
            end = (number + 1) * chunk
            key, value = in_order[:end].chunk(2, dim=-1)
            seen = torch.ones(chunk, end, dtype=torch.bool, device=query.device).tril(end - chunk)
            outputs.append(self._attend(queries, key, value, seen))
        return torch.cat(outputs).flatten(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[L, heads, head_dim] over [K, groups, head_dim] -> [L, heads, head_dim]; causal without a mask [L, K]."""
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return output.squeeze(0).transpose(0, 1)
