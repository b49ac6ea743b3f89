"""Which modules a layer is made of: TransformerEngine's where it is installed and there is CUDA, else our own.

Input: Megatron's configuration and the family. Output: the specification of the layers of a pipeline stage. This is the
one place that knows the difference. Invariants: both name their weights so that ``rlpost.weights.names.canonical``
understands them, and both have the same keys in a checkpoint. That TransformerEngine's side is built so is tested
against a stub of it (``tests/contract/cuda``); what it computes has no test without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlpost.actor.attention import PackedAttention
from rlpost.actor.norm import RMSNorm, SeparateRMSNorm
from rlpost.errors import ConfigError
from rlpost.weights.family import Family

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
"""Whose modules the layers are made of, as ``--transformer-impl`` spells it."""

_MLP_NORM = "pre_mlp_layernorm."


def has_transformer_engine() -> bool:
    """Whether TransformerEngine's modules can be used here."""
    return bool(gpt_layer_specs.HAVE_TE and torch.cuda.is_available())


def chosen_implementation(given: str | None) -> str:
    """``transformer_engine`` or ``local``: what is given, or the first where it can be used.

    Raises ConfigError when TransformerEngine is asked for and cannot be used.
    """
    if given == TRANSFORMER_ENGINE and not has_transformer_engine():
        raise ConfigError(
            "--transformer-impl transformer_engine: it is not installed on this node or "
            "there is no CUDA; install it or leave the setting out"
        )
    return given or (TRANSFORMER_ENGINE if has_transformer_engine() else LOCAL)


def implementation_name(chunks: Iterable[torch.nn.Module]) -> str:
    """Whose modules a model is made of, ``local`` or ``transformer_engine``, found by looking at them."""
    kinds = {type(module) for chunk in chunks for module in chunk.modules()}
    packages = {kind.__module__.partition(".")[0] for each in kinds for kind in each.__mro__}
    return TRANSFORMER_ENGINE if TRANSFORMER_ENGINE in packages else LOCAL


def block_spec(
    config: TransformerConfig, family: Family, *, implementation: str, stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of a virtual pipeline stage (None without interleaving) and the norm at their end."""
    with_engine = implementation == TRANSFORMER_ENGINE
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_engine, normalization=config.normalization, vp_stage=stage
    )
    for layer in {id(layer): layer for layer in block.layer_specs}.values():  # layers of one kind share a specification
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
        if not with_engine:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            attention.core_attention = PackedAttention
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = SeparateRMSNorm
            if layer.submodules.mlp.module is MoELayer:
                _separate_norm_of_experts(layer)
        if family.sandwich_norms:
            attention.linear_proj = with_end_norm(attention.linear_proj)
            mlp.linear_fc2 = with_end_norm(mlp.linear_fc2)
    if not with_engine:
        block.layer_norm = SeparateRMSNorm
    return block


def _separate_norm_of_experts(layer: ModuleSpec) -> None:
    """Name the norm before experts in a checkpoint as TransformerEngine does, which fuses only that of a dense MLP.

    Megatron's local specification gives both the name of the fused one (``gpt_layer_specs.py`` of 0.16.1), so that
    neither implementation could read what the other wrote.
    """
    layer.submodules.pre_mlp_layernorm = SeparateRMSNorm
    names = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {key: to for key, to in names.items() if key != _MLP_NORM}


def mark_shards_of_experts(chunk: torch.nn.Module) -> None:
    """Correct along which dimension the second weight of a TransformerEngine expert is sharded.

    Megatron shards experts itself and has TransformerEngine build them as if they were whole, so that it marks every
    weight with dimension 0. The second one is sharded along its columns.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name and ".linear_fc2.weight" in name and hasattr(parameter, "partition_dim"):
            parameter.partition_dim = 1


@cache
def with_end_norm(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The last linear layer of attention or MLP, followed by the norm that some families put before the residual."""

    class WithEndNorm(linear):  # type: ignore[misc,valid-type]
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.end_norm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, bias = super().forward(hidden)
            return self.end_norm(output), bias

    return WithEndNorm
