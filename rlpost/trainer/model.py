"""The Megatron model of a Hugging Face checkpoint.

It is a GPTModel whose layers are those of ``layer_specs``.

Input: the description of the checkpoint and the layout. Output: this rank's part of the model, one
chunk per virtual pipeline stage, with uninitialised weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlpost.config.plan import architecture
from rlpost.config.tree import Config
from rlpost.models.family import Family
from rlpost.models.names import is_float32
from rlpost.models.rope import axis_sections, rope_type
from rlpost.trainer import device, mtp, parallel
from rlpost.trainer.attention_backends import FLASH, FUSED, UNFUSED, Choice
from rlpost.trainer.frozen import freeze_by_name, keep_graph
from rlpost.trainer.kernels import accumulate_in_products, chosen_attention, kernel_fields
from rlpost.trainer.layer_specs import (
    TRANSFORMER_ENGINE,
    block_spec,
    implementation_of,
    mark_biases_of_experts,
    mark_shards_of_experts,
)
from rlpost.trainer.lora.adapters import adapt_layers, freeze_base, low_rank_updates
from rlpost.trainer.megatron_fields import configured
from rlpost.trainer.model_description import ModelDescription
from rlpost.trainer.rotary import set_attention_factor, set_frequencies, use_local_rotary
from rlpost.trainer.shared_rows import use_row_params
from rlpost.trainer.weights.inventory import Gather, Inventory, gather_entries, named_tensors

# megatron-core 0.16 reads the name even without TransformerEngine
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


ACTIVATIONS = {
    "silu": F.silu,
    "quick_gelu": quick_gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations of MLPs, by the names that families use.

Megatron compares them by identity: of its two ``quick_gelu``, TransformerConfig and the layers know
that of ``fusions``.
"""

ENGINE_VARIABLES = {
    FLASH: "NVTE_FLASH_ATTN",
    FUSED: "NVTE_FUSED_ATTN",
    UNFUSED: "NVTE_UNFUSED_ATTN",
}
"""TransformerEngine's variables that allow a backend of attention; it reads them in each pass."""
_allowed_backends: set[str] = set()
"""Those of all models of this process."""


def build_model(description: ModelDescription, config: Config) -> list[GPTModel]:
    """Build this rank's chunks of the model, on the current device. Needs parallel state.

    Weights are uninitialised: importing or loading a checkpoint fills all of them. Parameters have
    the dtype of the settings, unless their rule is ``is_float32``. That includes the router's weight,
    as in the checkpoints of all families; the router's bias stays float32.

    Raises:
        ConfigError: a requested kernel is not available, or Megatron-core rejects the settings.
    """
    num_stages = description.num_virtual_stages(config)
    implementation = implementation_of(config)
    attention = chosen_attention(description, config, implementation=implementation)
    transformer = _transformer_config(
        description, config, implementation=implementation, attention=attention
    )
    chunks = []
    for stage in [None] if num_stages is None else range(num_stages):
        spec = block_spec(
            transformer,
            description.family,
            implementation=implementation,
            with_packed_attention=not attention.is_of_engine,
            stage=stage,
            adapt=None if config.lora.lora_rank is None else partial(adapt_layers, config=config),
        )
        with _restrict_engine(attention):
            chunks.append(_chunk(transformer, description, spec, stage))
        if config.grpo.enable_mtp_training and chunks[-1].post_process:
            mtp.attach(chunks[-1], spec, implementation=implementation, stage=stage)
        _convert(chunks[-1], transformer.params_dtype, description.family)
        mark_biases_of_experts(chunks[-1])
        if implementation == TRANSFORMER_ENGINE:
            mark_shards_of_experts(chunks[-1])
            accumulate_in_products(chunks[-1], config)
        if config.lora.lora_rank is not None:
            freeze_base(chunks[-1])
            keep_graph(chunks[-1])
    freeze_by_name(chunks, config, tied=description.tied)
    return chunks


@contextmanager
def _restrict_engine(attention: Choice) -> Iterator[None]:
    """Allow TransformerEngine the backends that were chosen, after Megatron has built a model.

    By default Megatron allows all three, and expects that while it builds the next model. Where
    the other two refuse a pass, TransformerEngine would take its unfused attention in silence,
    whose scores take memory of the square of the longest sequence.
    """
    for variable in ENGINE_VARIABLES.values() if _allowed_backends else ():
        os.environ.pop(variable, None)
    yield
    _allowed_backends.update(attention.backends)
    for backend, variable in ENGINE_VARIABLES.items() if _allowed_backends else ():
        os.environ[variable] = str(int(backend in _allowed_backends))


def _convert(chunk: GPTModel, dtype: torch.dtype, family: Family) -> None:
    """Convert every parameter to ``dtype`` or float32, and move it to the device.

    Megatron creates the router's weight in host memory and moves it in the first forward pass
    (``router.py`` of 0.16.1). A converter never runs a forward pass: it would broadcast host memory
    over NCCL.
    """
    weights = named_tensors([chunk])
    float32 = {tensor for name, tensor in weights if is_float32(name, family.rules)}
    for module in chunk.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            kind = torch.float32 if parameter in float32 else dtype
            converted = parameter.data.to(device=device.current(), dtype=kind)
            if converted.device == parameter.device:
                parameter.data = converted
                continue
            moved = torch.nn.Parameter(converted, requires_grad=parameter.requires_grad)
            vars(moved).update(vars(parameter))  # Megatron's sharding and reduction attributes
            setattr(module, name, moved)


def inventory_of(
    chunks: Sequence[GPTModel],
    description: ModelDescription,
    *,
    gather: Gather = gather_entries,
) -> Inventory:
    """All weights of the model, and those that these chunks hold. Pipeline-group collective.

    ``gather`` exchanges entries between pipeline stages.
    """
    return Inventory(
        chunks,
        family=description.family,
        dims=description.dims,
        groups=parallel.weight_groups(),
        tied=description.tied,
        low_rank=low_rank_updates(chunks),
        gather=gather,
    )


def _chunk(
    config: TransformerConfig,
    description: ModelDescription,
    spec: TransformerBlockSubmodules,
    stage: int | None,
) -> GPTModel:
    hf = description.hf_config
    if not config.multi_latent_attention:
        set_attention_factor(config, description.rope)
    chunk = GPTModel(
        config,
        spec,
        # padded, because every tensor-parallel rank has the same number of rows
        vocab_size=hf["vocab_size"] + -hf["vocab_size"] % config.tensor_model_parallel_size,
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        rotary_base=description.rope["rope_theta"],
        rotary_percent=architecture.rotary_percent(hf),
        share_embeddings_and_output_weights=description.tied,
        parallel_output=True,
        vp_stage=stage,
    )
    if not config.multi_latent_attention:
        _scale_positions(chunk, description)
        # after the hooks that choose the table of a layer
        use_row_params(chunk, axis_sections(hf))
    _scale_ends(chunk, description)
    return chunk


def _scale_positions(chunk: GPTModel, description: ModelDescription) -> None:
    """Set the frequencies of the checkpoint.

    Latent attention has a rotary embedding in each layer.
    """
    if rope_type(description.rope) != "default":
        set_frequencies(chunk.rotary_pos_emb, description.rope)
    if description.local_rope is not None:
        local = copy.copy(chunk.rotary_pos_emb)
        set_frequencies(local, description.local_rope)
        use_local_rotary(chunk, local)


def _scale_ends(chunk: GPTModel, description: ModelDescription) -> None:
    """Scale the embeddings, and limit the logits z to cap * tanh(z / cap), where the family does.

    The factor sqrt(hidden size) is rounded to the dtype of the weights, as in transformers'
    ``Gemma3TextScaledWordEmbedding``.
    """
    if description.family.scales_embedding and chunk.pre_process:
        chunk.embedding.register_forward_hook(partial(_scaled, chunk.config.hidden_size**0.5))
    cap = description.hf_config.get("final_logit_softcapping")
    if cap and chunk.post_process:
        chunk.output_layer.register_forward_hook(partial(_capped, cap))


def _scaled(
    factor: float, _: torch.nn.Module, __: tuple[object, ...], output: torch.Tensor
) -> torch.Tensor:
    return output * torch.tensor(factor, dtype=output.dtype)


def _capped(
    cap: float,
    _: torch.nn.Module,
    __: tuple[object, ...],
    output: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits, bias = output
    return cap * torch.tanh(logits / cap), bias


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _transformer_config(
    description: ModelDescription,
    config: Config,
    *,
    implementation: str,
    attention: Choice,
) -> TransformerConfig:
    hf, dtype = description.hf_config, device.weight_dtype(config.perf.bf16)
    latent = description.fields.get("multi_latent_attention", False)
    kind = MLATransformerConfig if latent else TransformerConfig
    return configured(kind, config.megatron.options)(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=description.head_dim,
        ffn_hidden_size=architecture.dense_ffn(hf),
        gated_linear_unit=True,
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        transformer_impl=implementation,
        cp_comm_type=attention.cp_comm_type,
        # perform_initialization=False would also omit the attributes of tensor-parallel parameters.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        # The loss is a weighted sum with global denominators: Megatron must sum and never average.
        calculate_per_token_loss=True,
        **_layout_fields(config, description.num_virtual_stages(config)),
        pipeline_dtype=dtype,
        **(
            {"activation_func": F.silu, "add_bias_linear": False}
            | _family_fields(description)
            | kernel_fields(description, config, implementation=implementation)
        ),
    )


def _family_fields(description: ModelDescription) -> dict[str, object]:
    """The family's fields, with functions in place of their names."""
    fields = dict(description.fields)
    if "activation_func" in fields:
        fields["activation_func"] = ACTIVATIONS[fields["activation_func"]]
    return fields


def _layout_fields(config: Config, num_virtual_stages: int | None) -> dict[str, object]:
    perf = config.perf
    tensor, pipeline = perf.tensor_model_parallel_size, perf.pipeline_model_parallel_size
    interleaved = num_virtual_stages is not None
    return {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": perf.sequence_parallel and tensor > 1,
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": num_virtual_stages,
        "num_layers_in_first_pipeline_stage": perf.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": perf.decoder_last_pipeline_num_layers,
        "variable_seq_lengths": pipeline > 1,  # packed rows differ in length
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": perf.context_parallel_size,
        "expert_model_parallel_size": perf.expert_model_parallel_size,
        "expert_tensor_parallel_size": perf.expert_tensor_parallel_size,
        "recompute_granularity": perf.recompute_granularity,
        "recompute_method": perf.recompute_method,
        "recompute_num_layers": perf.recompute_num_layers,
    }
