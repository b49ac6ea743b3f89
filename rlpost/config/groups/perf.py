"""The table [perf] of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from rlpost.config.groups.base import Group, Positive
from rlpost.models.fp8 import BLOCKWISE


def _always(given: bool) -> bool:
    if not given:
        raise ValueError("only true is supported")
    return given


Always = Annotated[bool, AfterValidator(_always)]


FP8_ROWS = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Divisor of the rows of a matrix product in FP8, by ``--fp8-recipe``: a block of each recipe.

Gradients of weights sum over rows, and FP8 products need sums over multiples of 16.
"""


def fp8_rows(options: Mapping[str, object]) -> int:
    """Return the divisor of a rank's rows that ``options`` of Megatron-core need; 1 without FP8."""
    return FP8_ROWS.get(str(options.get("fp8_recipe")), 1) if options.get("fp8") else 1


def trains_in_blocks(options: Mapping[str, object]) -> bool:
    """Return whether ``options`` of Megatron-core compute in FP8 blocks of 128 x 128."""
    return bool(options.get("fp8")) and options.get("fp8_recipe") == BLOCKWISE


class PerfConfig(Group):
    """Parallelism, recomputation, precision and micro-batches of the trainer."""

    tensor_model_parallel_size: Positive = 1
    """Tensor-parallel size."""
    sequence_parallel: bool = False
    """Shard activations along the sequence over the tensor-parallel ranks; no effect without
    tensor parallelism, as in Megatron-LM."""
    pipeline_model_parallel_size: Positive = 1
    """Pipeline-parallel size."""
    num_layers_per_virtual_pipeline_stage: Positive | None = None
    """Layers per virtual stage, for the interleaved pipeline schedule."""
    decoder_first_pipeline_num_layers: Positive | None = None
    """Layers of the first stage, for uneven stages."""
    decoder_last_pipeline_num_layers: Positive | None = None
    """Layers of the last stage, for uneven stages."""
    context_parallel_size: Positive = 1
    """Context-parallel size: ranks that shard each sequence."""
    expert_model_parallel_size: Positive = 1
    """Expert-parallel size: ranks that share the experts of a layer."""
    expert_tensor_parallel_size: Positive | None = None
    """Tensor-parallel size of a single expert. Default: --tensor-model-parallel-size."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: of whole layers (full) or of attention only
    (selective)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full: recompute all layers in chunks of --recompute-num-layers (uniform), or that many
    layers of each stage (block)."""
    recompute_num_layers: Positive | None = None
    """Layers per chunk (uniform) or per stage (block)."""
    bf16: bool | None = None
    """Compute in bfloat16 with float32 main weights. Default: on with GPUs."""
    accumulate_allreduce_grads_in_fp32: bool = True
    """Accumulate and reduce gradients in float32."""
    attention_softmax_in_fp32: Always = True
    """Attention softmax in float32; only true is supported."""
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    """Token dispatcher of the experts; flex needs --moe-enable-deepep."""
    moe_enable_deepep: bool = False
    """Dispatch tokens with DeepEP, which must be installed on the nodes."""
    moe_grouped_gemm: bool | None = None
    """Compute the experts of a rank with one grouped GEMM instead of one after the other; on GPUs
    this needs TransformerEngine. Default: on where it is installed."""
    moe_permute_fusion: bool | None = None
    """Permute tokens with TransformerEngine's fused kernel. Default: on where it is installed."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Precision of the router."""
    no_rope_fusion: bool = False
    """Do not use TransformerEngine's fused RoPE kernel."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the all-gather of updated weights with the next forward pass; needs the two settings
    above."""
    use_dynamic_batch_size: bool = False
    """Pack samples up to --max-tokens-per-gpu tokens instead of --micro-batch-size samples."""
    max_tokens_per_gpu: Positive | None = None
    """Tokens of a micro-batch on one GPU (in all, this times the context-parallel size). A longer
    sample gets its own micro-batch and is never truncated."""
    log_probs_max_tokens_per_gpu: Positive | None = None
    """The same limit for forward-only passes that compute log-probs. Default:
    --max-tokens-per-gpu."""
    fused_log_probs: bool = True
    """Compute log-probs and entropies by Triton kernels on GPUs, where a token has one target and no
    sampling mask."""
    share_prefix: bool | None = None
    """Compute a beginning that samples of a micro-batch share once, such as the prompt of several
    answers. Default: on without GPUs where the result is the same; the driver's log has the reason
    where it is off."""
    balance_data: bool = False
    """Balance the compute of the samples, attention included, over the data-parallel ranks;
    otherwise samples are assigned round-robin."""
    micro_batch_size: Positive = 1
    """Samples per micro-batch without --use-dynamic-batch-size."""
    actor_num_threads: Positive | None = None
    """CPU threads per operator of a trainer rank. Default: 1; with --optimizer-cpu-offload or
    without GPUs, an even share of the job's cores on the node."""

    @model_validator(mode="after")
    def _without_tensor_parallelism(self) -> PerfConfig:
        """One rank has the whole sequence; Megatron-core refuses to shard it."""
        if self.tensor_model_parallel_size == 1:
            vars(self)["sequence_parallel"] = False  # the group is frozen
        return self

    @property
    def sequence_multiple(self) -> int:
        """Divisor of the padded length of every packed sequence.

        A context-parallel rank holds two chunks of each sequence.
        """
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
