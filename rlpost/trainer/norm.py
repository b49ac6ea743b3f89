"""RMSNorm with support for sequence parallelism.

Megatron's wrapper of torch's norm rejects sequence parallelism. There each rank has only a part of
the sequence, so the gradient of the weight must be summed over the tensor-parallel ranks. Megatron
does this for parameters with the attribute ``sequence_parallel``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch.autograd.function import FunctionCtx

from rlpost.trainer import device


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, computed in float32 as Hugging Face does.

    y = weight * x / sqrt(mean(x^2) + eps). With ``layernorm_zero_centered_gamma`` the factor is 1 +
    weight, also computed in float32.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device.current())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.is_zero_centered:
            return (wide * (1.0 + self.weight.float())).to(hidden.dtype)
        return self.weight * wide.to(hidden.dtype)


class SeparateRMSNorm(RMSNorm):
    """An RMSNorm that is not fused with the next linear layer.

    It is a separate module with TransformerEngine too.

    TransformerEngine's module writes an extra state into every checkpoint, even if empty, and
    rejects checkpoints without it. So this module writes an empty one.
    """

    def get_extra_state(self) -> None:
        """Return the content of ``_extra_state``: None."""

    def set_extra_state(self, state: object) -> None:
        """Ignore the state: TransformerEngine stores FP8 scales there, which are not used here."""


class ShardedByHead(torch.nn.Module):
    """A module whose parameters are all sharded over the tensor-parallel ranks, along axis 0."""

    tensor_group: dist.ProcessGroup

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Return the parameters in Megatron's sharded form; empty for a module without any."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class ProjectionRMSNorm(ShardedByHead):
    """RMSNorm over all heads of a projection together, sharded by heads (MiniMax-M2).

    The mean square is that of the heads of all tensor-parallel ranks. Input and output:
    [..., heads of this rank, head_dim]. The weight is [heads of this rank x head_dim].
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        num_heads: int,
    ) -> None:
        """Create this rank's weight; ``num_heads`` of ``hidden_size`` are on all ranks together."""
        super().__init__()
        self.eps = eps
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.width = num_heads * hidden_size
        weight = torch.ones(
            self.width // self.tensor_group.size(),
            dtype=config.params_dtype,
            device=device.current(),
        )
        self.weight = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        wide = heads.flatten(-2).float()
        own = wide.pow(2).sum(-1, keepdim=True)
        squares: torch.Tensor = _SumOverRanks.apply(own, self.tensor_group)
        wide = wide * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * wide.to(heads.dtype)).view_as(heads)


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks of a group.

    Each rank uses the sum in its own computation, so gradients are summed too.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _summed(value, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return value
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, group=group)
    return value
