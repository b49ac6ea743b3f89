"""RMSNorm that works with sequence parallelism.

Megatron's own wrapper around torch's norm refuses sequence parallelism. With it every rank sees a part of the sequence
only, so the gradient of the weight must be summed over the tensor-parallel ranks: the mark on the parameter asks for
that.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from rlpost.actor import device


class RMSNorm(torch.nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32 as Hugging Face does."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device.current()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class SeparateRMSNorm(RMSNorm):
    """The same where TransformerEngine has a separate module too, instead of one fused with the linear layer after it.

    Such a module has an extra state in every checkpoint, even where it is empty, and refuses one without it. So this
    one writes an empty one.
    """

    def get_extra_state(self) -> None:
        """Return what is written under ``_extra_state``: nothing."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore what was read: TransformerEngine keeps scales of FP8 there, which nothing here computes in."""
