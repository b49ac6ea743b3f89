"""Which modules a layer is made of: TransformerEngine's where it is installed and there is CUDA, else our own.

In: Megatron's configuration and the family. Out: the specification of the layers of a pipeline stage. This is the one
place that knows the difference; both name their weights so that ``rlpost.weights.names.canonical`` understands them.
What is TransformerEngine's runs on CUDA only and has no test without it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlpost.actor.attention import PackedAttention
from rlpost.actor.norm import RMSNorm
from rlpost.errors import ConfigError
from rlpost.weights.family import Family


def has_transformer_engine() -> bool:
    """Whether TransformerEngine's modules can be used here."""
    return bool(gpt_layer_specs.HAVE_TE and torch.cuda.is_available())


def chosen_implementation(given: str | None) -> str:
    """``transformer_engine`` or ``local``: what is given, or the first where it can be used.

    Raises ConfigError when TransformerEngine is asked for and cannot be used.
    """
    if given == "transformer_engine" and not has_transformer_engine():
        raise ConfigError(
            "perf.transformer_impl (--transformer-impl) = transformer_engine: it is not installed on this node or "
            "there is no CUDA; install it or leave the setting out"
        )
    return given or ("transformer_engine" if has_transformer_engine() else "local")


def block_spec(
    config: TransformerConfig, family: Family, *, implementation: str, stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of a virtual pipeline stage (None without interleaving) and the norm at their end."""
    with_engine = implementation == "transformer_engine"
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_engine, normalization=config.normalization, vp_stage=stage
    )
    for layer in {id(layer): layer for layer in block.layer_specs}.values():  # layers of one kind share a specification
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
        if not with_engine:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            attention.core_attention = PackedAttention
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
        if family.sandwich_norms:
            attention.linear_proj = with_end_norm(attention.linear_proj)
            mlp.linear_fc2 = with_end_norm(mlp.linear_fc2)
    if not with_engine:
        block.layer_norm = RMSNorm
    return block


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
