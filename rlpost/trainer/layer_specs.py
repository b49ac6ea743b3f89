"""Select the modules of a layer: TransformerEngine's or local ones.

TransformerEngine is the default if it is usable: installed, on a machine with CUDA. Its attention
is replaced where it lacks what the model needs (``attention_backends``).

Input: Megatron's configuration and the family. Output: the specification of a pipeline stage's
layers. No other module depends on the implementation. Invariants: in both implementations
``rlpost.models.names.canonical`` maps the names of weights, and the keys of a checkpoint are the
same. For TransformerEngine this is tested against a stub (``tests/contract/cuda``); its numerical
results are tested only with a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlpost.config.tree import Config
from rlpost.models.families.deepseek import LATENT_NORM_EPS
from rlpost.models.family import Family
from rlpost.trainer.attention import PackedAttention
from rlpost.trainer.delta_net import GatedDeltaNet
from rlpost.trainer.norm import ProjectionRMSNorm, RMSNorm, SeparateRMSNorm

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
"""Implementations of the layers: the values of Megatron's ``transformer_impl``."""


def has_transformer_engine() -> bool:
    """Return whether TransformerEngine is installed and CUDA is available."""
    return bool(gpt_layer_specs.HAVE_TE and torch.cuda.is_available())


def implementation_of(config: Config) -> str:
    """Return ``transformer_engine`` if it is usable and the run trains no adapters, else ``local``.

    Adapters are subclasses of Megatron's own linear layers.
    """
    has_adapters = config.lora.lora_rank is not None
    return LOCAL if has_adapters or not has_transformer_engine() else TRANSFORMER_ENGINE


def implementation_name(chunks: Iterable[torch.nn.Module]) -> str:
    """Return the implementation of a model, ``local`` or ``transformer_engine``.

    It follows from the types of the modules.
    """
    kinds = {type(module) for chunk in chunks for module in chunk.modules()}
    packages = {kind.__module__.partition(".")[0] for each in kinds for kind in each.__mro__}
    return TRANSFORMER_ENGINE if TRANSFORMER_ENGINE in packages else LOCAL


def block_spec(
    config: TransformerConfig,
    family: Family,
    *,
    implementation: str,
    with_packed_attention: bool,
    stage: int | None,
    adapt: Callable[[Iterable[ModuleSpec]], None] | None = None,
) -> TransformerBlockSubmodules:
    """Return the layers of a virtual pipeline stage, and the final norm.

    ``with_packed_attention``: ``PackedAttention`` computes attention, in either implementation.
    ``stage`` is None without interleaving. ``adapt`` changes the specifications of the layers
    before norms are added to linear layers.
    """
    with_engine = implementation == TRANSFORMER_ENGINE
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_engine,
        normalization=config.normalization,
        vp_stage=stage,
    )
    # equal layers share a specification
    unique_layers = {id(layer): layer for layer in block.layer_specs}
    if adapt is not None:
        adapt(unique_layers.values())
    for layer in unique_layers.values():
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
        if not with_engine:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = SeparateRMSNorm
        if with_packed_attention:
            attention.core_attention = PackedAttention
        if config.multi_latent_attention:
            adapt_latent_attention(layer, with_engine=with_engine)
        if not with_engine and layer.submodules.mlp.module is MoELayer:
            _separate_norm_of_experts(layer)
            if config.add_bias_linear:
                experts = layer.submodules.mlp.submodules.experts.submodules
                experts.linear_fc2 = with_own_output(experts.linear_fc2)
        if family.projection_norms:
            attention.q_layernorm = _projection_norm(config.num_attention_heads)
            attention.k_layernorm = _projection_norm(config.num_query_groups)
        if family.sandwich_norms:
            attention.linear_proj = with_end_norm(attention.linear_proj)
            mlp.linear_fc2 = with_end_norm(mlp.linear_fc2)
    if config.linear_attention_freq is not None:
        _insert_linear_attention(block, config, stage)
    if not with_engine:
        block.layer_norm = SeparateRMSNorm
    return block


def _insert_linear_attention(
    block: TransformerBlockSubmodules, config: TransformerConfig, stage: int | None
) -> None:
    """Replace the attention of the layers that ``linear_attention_freq`` marks.

    Their norm is a separate module in both implementations, under its own name in a checkpoint.
    """
    assert block.layer_specs is not None and isinstance(config.linear_attention_freq, list)
    offset = get_transformer_layer_offset(config, vp_stage=stage)
    for number, layer in enumerate(block.layer_specs):
        if not config.linear_attention_freq[offset + number]:
            continue
        layer = block.layer_specs[number] = copy.deepcopy(layer)
        layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet)
        layer.submodules.input_layernorm = SeparateRMSNorm
        _keep_key(layer, "input_layernorm.")


def _projection_norm(num_heads: int | None) -> ModuleSpec:
    return ModuleSpec(module=ProjectionRMSNorm, params={"num_heads": num_heads})


def _separate_norm_of_experts(layer: ModuleSpec) -> None:
    """Name the norm before experts in a checkpoint as with TransformerEngine.

    TransformerEngine fuses only the norm of a dense MLP. Megatron's local specification uses the
    name of the fused norm for both (``gpt_layer_specs.py`` of 0.16.1). Without this change neither
    implementation could read the other's checkpoints.
    """
    layer.submodules.pre_mlp_layernorm = SeparateRMSNorm
    _keep_key(layer, "pre_mlp_layernorm.")


def _keep_key(layer: ModuleSpec, prefix: str) -> None:
    """Store a module of a layer under its own name instead of that of a fused one."""
    keys = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {
        key: to for key, to in keys.items() if key != prefix
    }


def mark_shards_of_experts(chunk: torch.nn.Module) -> None:
    """Correct the shard dimension of the second weight of each TransformerEngine expert.

    Megatron shards experts itself, and TransformerEngine builds each shard as an unsharded expert,
    with dimension 0 as ``partition_dim`` of every weight. The second weight is sharded along its
    columns (dimension 1).
    """
    for name, parameter in chunk.named_parameters():
        if (
            ".experts." in name
            and ".linear_fc2.weight" in name
            and hasattr(parameter, "partition_dim")
        ):
            parameter.partition_dim = 1


def mark_biases_of_experts(chunk: torch.nn.Module) -> None:
    """Exclude the biases of experts from the sum of gradients over tensor-parallel ranks.

    Megatron's row-parallel layer marks every bias for that sum with sequence parallelism. Here each
    of those ranks has other experts.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name and ".linear_fc2.bias" in name:
            vars(parameter)["sequence_parallel"] = False


@cache
def with_own_output(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a subclass of ``linear`` whose output may be changed in place.

    Megatron adds the bias of an expert in place (``mlp.py`` of 0.16.1). The output of its local
    linear layer is a view that autograd does not allow to change.
    """

    class WithOwnOutput(linear):  # type: ignore[misc,valid-type]
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, bias = super().forward(hidden)
            return output.clone(), bias

    return WithOwnOutput


@cache
def with_end_norm(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a subclass of ``linear`` with a norm on its output.

    For the last linear layer of attention and MLP in families with a norm before the residual.
    """

    class WithEndNorm(linear):  # type: ignore[misc,valid-type]
        def __init__(
            self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object
        ) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.end_norm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, bias = super().forward(hidden)
            return self.end_norm(output), bias

    return WithEndNorm


# Without TransformerEngine megatron-core 0.16 sets the flag all the same, and its class is a mock.
multi_latent_attention.HAVE_TE &= isinstance(multi_latent_attention.TELinear, type)

DENSE_NORM_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
"""Checkpoint key of the norm before a dense MLP: with TransformerEngine it is part of the MLP."""


class LatentNorm(SeparateRMSNorm):
    """The norm of a narrow vector."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: object) -> None:
        super().__init__(config, hidden_size, eps=LATENT_NORM_EPS)


class LatentAttention(MLASelfAttention):
    """Megatron's MLA with the gradient of the key that all heads share summed over ranks.

    Each rank uses this key for its own heads, so its gradient is the sum over the tensor-parallel
    ranks. Megatron-core 0.16.1 gathers the output of a sharded projection with an operation whose
    backward pass takes one rank's part (``multi_latent_attention.py``,
    ``get_query_key_value_tensors``). A projection that returns its whole output takes the other
    branch there, which is correct with sequence parallelism; without it the sum is added here.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.linear_kv_down_proj.register_forward_hook(self._whole)

    def _whole(
        self, _: torch.nn.Module, __: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gather the output: [s, b, (rank + position) / TP] -> [s, b, rank + position].

        With sequence parallelism the result is this rank's part of s.
        """
        sharded, bias = output
        config, group = self.config, self.pg_collection.tp
        if group.size() == 1:
            return output
        whole = gather_from_tensor_model_parallel_region(sharded, group=group)
        if config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole, group=group), bias
        narrow, position = whole.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        position = copy_to_tensor_model_parallel_region(position, group=group)
        if position.requires_grad:
            # The gradient from ``cat`` is a view, and Megatron would sum a copy that it drops.
            position.register_hook(torch.Tensor.contiguous)
        return torch.cat([narrow, position], dim=-1), bias


def adapt_latent_attention(layer: ModuleSpec, *, with_engine: bool) -> None:
    """Change the attention of a layer's specification to ``LatentAttention`` (arXiv 2405.04434, 2.1).

    Weights and checkpoint keys are those of the other implementation. The projections to the narrow
    vectors are sharded as all others; their norms are separate modules, with another epsilon.
    """
    layer.submodules.self_attention.module = LatentAttention
    attention = layer.submodules.self_attention.submodules
    # Otherwise TransformerEngine holds the narrow projections on every rank, and fuses the norms.
    attention.linear_q_down_proj = attention.linear_kv_down_proj = attention.linear_q_proj
    attention.linear_q_up_proj = attention.linear_kv_up_proj = attention.linear_q_proj
    attention.q_layernorm = attention.kv_layernorm = LatentNorm
    if not with_engine:
        layer.submodules.input_layernorm = SeparateRMSNorm
        layer.submodules.sharded_state_dict_keys_map = dict(DENSE_NORM_KEYS)
