"""The Megatron model of a Hugging Face checkpoint: a GPTModel with the attention and norms of this package.

In: the description of the checkpoint and the tensor-parallel layout. Out: this rank's part of the model, its weights
not yet set.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlpost.actor.attention import PackedAttention
from rlpost.actor.description import ModelDescription
from rlpost.actor.norm import RMSNorm


def build_model(description: ModelDescription, *, tensor_model_parallel_size: int, sequence_parallel: bool) -> GPTModel:
    """This rank's part of the model in float32, on the current device. Needs parallel state.

    The memory of the weights is not set: importing or loading a checkpoint fills all of it.
    """
    config = _transformer_config(
        description, tensor_model_parallel_size=tensor_model_parallel_size, sequence_parallel=sequence_parallel
    )
    hf = description.hf_config
    return GPTModel(
        config,
        _block_spec(config),
        vocab_size=hf["vocab_size"] + -hf["vocab_size"] % tensor_model_parallel_size,
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=description.rope_theta,
        share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
        parallel_output=True,
    )


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _transformer_config(
    description: ModelDescription, *, tensor_model_parallel_size: int, sequence_parallel: bool
) -> TransformerConfig:
    hf = description.hf_config
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=description.head_dim,
        ffn_hidden_size=hf["intermediate_size"],
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        tensor_model_parallel_size=tensor_model_parallel_size,
        sequence_parallel=sequence_parallel and tensor_model_parallel_size > 1,
        # Fused kernels of Apex and TransformerEngine, which may be absent.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        # perform_initialization=False would also leave out the marks of tensor-parallel parameters.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        # The loss is a weighted sum with global denominators: Megatron must add up and never average.
        calculate_per_token_loss=True,
        **description.spec.transformer_fields,
    )


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers with the attention and norms of this package, the final norm included."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)
