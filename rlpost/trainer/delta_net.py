"""Linear attention of Qwen3-Next and Qwen3.5: a gated delta net over packed sequences.

Source: arXiv 2412.06464.

Input and output as for Megatron's SelfAttention, which it replaces in a layer: [T, 1, hidden], or
this rank's part of the rows with sequence parallelism. Megatron-core 0.16.1 has such a module too,
but it rejects packed sequences (``ssm/gated_delta_net.py``).

A tensor-parallel rank has some of the key heads, with the value heads that belong to them. All
weights are ordered by key head, so that each rank has consecutive rows. Context parallelism is not
supported: the state would have to pass from rank to rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from rlpost.trainer import device
from rlpost.trainer.delta_rule import delta_rule, short_convolution

L2_EPS = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""


class GatedDeltaNet(MegatronModule):
    """The linear attention of a layer."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        """Create this rank's weights, uninitialised. ``layer_number`` starts at 1."""
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        size = self.tp_group.size()
        self.key_heads, self.repeats = key_heads // size, value_heads // key_heads
        keys, values = key_heads * self.key_dim, value_heads * self.value_dim
        self.in_proj_qkvz = self._column(config, 2 * keys + 2 * values)
        self.in_proj_ba = self._column(config, 2 * value_heads)
        self.out_proj = RowParallelLinear(
            values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )
        channels = (2 * keys + values) // size
        self.conv_weight = _sharded(config, channels, 1, config.linear_conv_kernel_dim)
        self.A_log = _sharded(config, value_heads // size)
        self.dt_bias = _sharded(config, value_heads // size)
        self.norm_weight = _parameter(config, self.value_dim)

    def _column(self, config: TransformerConfig, rows: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            config.hidden_size,
            rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the output of the layer's attention, and no bias."""
        assert packed_seq_params is not None
        starts = packed_seq_params.cu_seqlens_q
        keys, values = self.key_dim, self.repeats * self.value_dim
        projected = self.in_proj_qkvz(hidden_states)[0].squeeze(1)
        channels, gate = projected.unflatten(-1, (self.key_heads, -1)).split(
            [2 * keys + values, values], dim=-1
        )
        mixed = short_convolution(channels.flatten(1), self.conv_weight.squeeze(1), starts)
        query, key, value = (
            F.silu(mixed).unflatten(-1, (self.key_heads, -1)).split([keys, keys, values], dim=-1)
        )
        pairs = self.in_proj_ba(hidden_states)[0].squeeze(1).unflatten(-1, (self.key_heads, 2, -1))
        beta, step = pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)
        decay = -self.A_log.float().exp() * F.softplus(step.float() + self.dt_bias)
        output = delta_rule(
            _unit(query) * keys**-0.5, _unit(key), self._heads(value), decay, beta.sigmoid(), starts
        )
        output = self._normed(output, self._heads(gate))
        attended: torch.Tensor = self.out_proj(output.flatten(1).unsqueeze(1))[0]
        return attended, None

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        """[T, key heads, values of a key head] -> [T, value heads, value_dim]."""
        return values.unflatten(-1, (self.repeats, self.value_dim)).flatten(1, 2)

    def _normed(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each head, then SiLU of the gate as a factor.

        Every rank uses the weight for its own heads, so the gradient is summed over the ranks.
        """
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        wide = output.float()
        wide = wide * torch.rsqrt(
            wide.pow(2).mean(-1, keepdim=True) + self.config.layernorm_epsilon
        )
        return (weight * wide.to(output.dtype) * F.silu(gate.float())).to(output.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """All weights; those by head are sharded over the tensor-parallel ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        sharded: dict[str, object] = {}
        self._save_to_state_dict(sharded, "", keep_vars=True)
        state_dict = make_sharded_tensors_for_checkpoint(
            sharded,
            prefix,
            dict.fromkeys(("conv_weight", "A_log", "dt_bias"), 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state_dict |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state_dict


def _unit(heads: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, in float32."""
    wide = heads.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + L2_EPS)


def _parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(
        torch.zeros(shape, dtype=config.params_dtype, device=device.current())
    )


def _sharded(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    parameter = _parameter(config, *shape)
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
