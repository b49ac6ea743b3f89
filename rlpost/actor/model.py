"""The Megatron model of a Hugging Face checkpoint: a GPTModel with the attention and norms of this package.

In: the description of the checkpoint and the layout. Out: this rank's part of the model, a chunk for each virtual
pipeline stage, its weights not yet set.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlpost.actor.attention import PackedAttention
from rlpost.actor.description import ModelDescription
from rlpost.actor.norm import RMSNorm, RowParallelLinearWithNorm
from rlpost.actor.settings import ActorSettings

if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16 reads the name even without TransformerEngine
    moe_utils.te_general_gemm = None


def build_model(description: ModelDescription, settings: ActorSettings) -> list[GPTModel]:
    """This rank's chunks of the model in float32, on the current device. Needs parallel state.

    The memory of the weights is not set: importing or loading a checkpoint fills all of it.
    """
    num_stages = description.num_virtual_stages(settings)
    config = _transformer_config(description, settings, num_virtual_stages=num_stages)
    stages = [None] if num_stages is None else range(num_stages)
    return [_chunk(config, description, stage) for stage in stages]


def _chunk(config: TransformerConfig, description: ModelDescription, stage: int | None) -> GPTModel:
    hf = description.hf_config
    return GPTModel(
        config,
        _block_spec(config, description, stage),
        vocab_size=hf["vocab_size"] + -hf["vocab_size"] % config.tensor_model_parallel_size,
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        rotary_base=description.rope_theta,
        rotary_percent=description.rotary_percent,
        rope_scaling=description.rope_factor is not None,
        rope_scaling_factor=description.rope_factor or 1.0,
        share_embeddings_and_output_weights=description.tied,
        parallel_output=True,
        vp_stage=stage,
    )


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _transformer_config(
    description: ModelDescription, settings: ActorSettings, *, num_virtual_stages: int | None
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
        **_layout_fields(settings, num_virtual_stages),
        **description.fields,
    )


def _layout_fields(settings: ActorSettings, num_virtual_stages: int | None) -> dict[str, Any]:
    tensor, pipeline = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    interleaved = num_virtual_stages is not None
    return {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": settings.sequence_parallel and tensor > 1,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": num_virtual_stages,
        "num_layers_in_first_pipeline_stage": settings.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": settings.decoder_last_pipeline_num_layers,
        "pipeline_dtype": torch.float32,
        "variable_seq_lengths": pipeline > 1,  # packed rows differ in length
        "moe_token_dispatcher_type": "alltoall",  # the other one needs equal lengths
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": settings.context_parallel_size,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        "expert_tensor_parallel_size": settings.expert_tensor_parallel_size,
        "recompute_granularity": settings.recompute_granularity,
        "recompute_method": settings.recompute_method,
        "recompute_num_layers": settings.recompute_num_layers,
    }


def _block_spec(
    config: TransformerConfig, description: ModelDescription, stage: int | None
) -> TransformerBlockSubmodules:
    """Megatron's local layers with the attention and norms of this package, the final norm included."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=stage
    )
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if description.family.sandwich_norms:
            attention.linear_proj = layer.submodules.mlp.submodules.linear_fc2 = RowParallelLinearWithNorm
    block.layer_norm = RMSNorm
    return block
