"""Core attention over packed sequences without TransformerEngine.

In: query, key, value of shape [T, heads of this rank, head_dim] and the boundaries of the sequences in T. Out:
[T, heads x head_dim]. Each token attends to those before it in its own sequence only. One scaled-dot-product call a
sequence: torch chooses the kernel, and the memory is linear in T wherever it has a fused one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
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
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(*part) for part in parts]).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One sequence, [L, heads, head_dim] -> [L, heads, head_dim]."""
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        grouped = query.size(1) != key.size(1)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return output.squeeze(0).transpose(0, 1)
