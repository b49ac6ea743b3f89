"""Linear layers of Megatron-core with a low-rank adapter.

Input: a class of linear layers and the settings of the adapters. Output: a subclass whose output is
W x + s B A x (Hu et al., arXiv 2106.09685, equation 3), with A of shape [rank, in] and B of shape
[out, rank]. B starts as zero, so the output starts as that of the base.

Shards over the tensor-parallel ranks:

| layer | A | B | collective on x A^T, [T, rank] |
|---|---|---|---|
| column-parallel | whole | rows, as W | its gradient is summed; with sequence parallelism an
all-gather |
| row-parallel | columns, as W | whole | all-reduce; with sequence parallelism a reduce-scatter |

So adapters send rank / hidden of what their layers send. With sequence parallelism the whole factor
sees only this rank's part of the sequence, and Megatron sums its gradient over the ranks, as that
of a norm. The token dispatcher sums outputs and gradients of experts; only the gradient of the
whole factor is summed here.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from rlpost.trainer import device
from rlpost.trainer.weights.low_rank import ADAPTER_A, ADAPTER_B, LowRank


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The adapters of one kind of linear layer."""

    rank: int
    alpha: float
    dropout: float
    dense: bool
    """Whether layers other than those of experts get one."""
    experts: bool
    """Whether layers of experts get one."""
    gated: bool
    """Whether the output is [gate; up] in each shard."""


class AdaptedLinear:
    """The adapter of a linear layer of Megatron; a base of the classes of ``with_adapter``."""

    plan: AdapterPlan
    is_column: bool
    """Whether the layer is column-parallel, otherwise row-parallel."""
    low_rank: LowRank | None = None
    """None for a layer that is not a target."""
    adapter_is_on = True
    """Turn it off to compute the output of the base."""
    # of Megatron's linear layers
    weight: torch.nn.Parameter
    input_size: int
    is_expert: bool
    sequence_parallel: bool
    training: bool
    tp_group: dist.ProcessGroup

    def add_adapter(self) -> None:
        """Create the factors if the layer is a target."""
        if not (self.plan.experts if self.is_expert else self.plan.dense):
            return
        rank, (out_size, in_size) = self.plan.rank, self.weight.shape
        here, dtype = device.current(), self.weight.dtype
        self.lora_a = torch.nn.Parameter(torch.zeros(rank, in_size, dtype=dtype, device=here))
        self.lora_b = torch.nn.Parameter(torch.zeros(out_size, rank, dtype=dtype, device=here))
        self.low_rank = LowRank(self.lora_a, self.lora_b, self.plan.alpha / rank)
        self._mark(self.lora_a, ADAPTER_A)
        self._mark(self.lora_b, ADAPTER_B)

    @property
    def shard_axis(self) -> dict[str, int]:
        """The factor that is sharded over the tensor-parallel ranks, and its axis."""
        return {ADAPTER_B: 0} if self.is_column else {ADAPTER_A: 1}

    def adapter_output(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] of this rank -> s B A x, [..., out] of this rank."""
        hidden = self._dropped(hidden)
        update = self._expert_update(hidden) if self.is_expert else self._dense_update(hidden)
        return self.plan.alpha / self.plan.rank * update

    def adapter_state(
        self, prefix: str, offsets: tuple[object, ...], metadata: Any
    ) -> dict[str, object]:
        """The factors in Megatron's sharded form; their shards are those of the weight."""
        if self.low_rank is None:
            return {}
        factors = make_sharded_tensors_for_checkpoint(
            {ADAPTER_A: self.lora_a, ADAPTER_B: self.lora_b},
            prefix,
            self.shard_axis,
            offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.plan.gated:
            key = prefix + ADAPTER_B
            factors[key] = apply_swiglu_sharded_factory(factors[key], offsets)
        return dict(factors)

    def _mark(self, factor: torch.nn.Parameter, name: str) -> None:
        """Set the attributes by which Megatron reduces and counts gradients."""
        factor.allreduce = self.weight.allreduce  # type: ignore[attr-defined]
        if name in self.shard_axis:
            set_tensor_model_parallel_attributes(factor, True, self.shard_axis[name], 1)
        elif not self.is_expert:
            factor.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif self.tp_group.rank() == 0:
            # The norm counts other parameters on the first tensor-parallel rank alone, but the
            # ranks of that group may hold different experts.
            set_tensor_model_parallel_attributes(factor, True, 0, 1)
        else:
            factor.shared = True  # type: ignore[attr-defined]  # not counted in the norm

    def _dense_update(self, hidden: torch.Tensor) -> torch.Tensor:
        narrow, group = F.linear(hidden, self.lora_a), self.tp_group
        if self.is_column and self.sequence_parallel:
            narrow = gather_from_sequence_parallel_region(narrow, group=group)
        elif self.is_column:
            narrow = copy_to_tensor_model_parallel_region(narrow, group=group)
        elif self.sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=group)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=group)
        return F.linear(narrow, self.lora_b)

    def _expert_update(self, hidden: torch.Tensor) -> torch.Tensor:
        """The update of an expert, whose dispatcher sums over the ranks that share it.

        The whole factor gets a part of its gradient on each of them: backward of the copy sums
        these parts.
        """
        a, b, group = self.lora_a, self.lora_b, self.tp_group
        if self.is_column:
            a = copy_to_tensor_model_parallel_region(a, group=group)
        else:
            b = copy_to_tensor_model_parallel_region(b, group=group)
        return F.linear(F.linear(hidden, a), b)

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply dropout: equal masks on ranks with equal inputs, else different masks."""
        if self.plan.dropout == 0.0 or not self.training:
            return hidden
        is_shard = self.tp_group.size() > 1 and (not self.is_column or self.sequence_parallel)
        with get_cuda_rng_tracker().fork() if is_shard else nullcontext():
            return F.dropout(hidden, self.plan.dropout)


@cache
def with_adapter(linear: type[torch.nn.Module], plan: AdapterPlan) -> type[torch.nn.Module]:
    """Return a subclass of a column- or row-parallel linear layer with an adapter."""

    class WithAdapter(linear, AdaptedLinear):  # type: ignore[misc,valid-type]
        def __init__(
            self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object
        ) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.plan, self.is_column = plan, issubclass(linear, ColumnParallelLinear)
            self.add_adapter()

        def forward(
            self, hidden: torch.Tensor, *args: object, **kwargs: object
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, bias = super().forward(hidden, *args, **kwargs)
            if self.low_rank is None or not self.adapter_is_on:
                return output, bias
            return output + self.adapter_output(hidden), bias

        def sharded_state_dict(
            self,
            prefix: str = "",
            sharded_offsets: tuple[object, ...] = (),
            metadata: object = None,
        ) -> dict[str, object]:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            return state | self.adapter_state(prefix, sharded_offsets, metadata)

    return WithAdapter
