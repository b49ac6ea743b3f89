"""The table [perf] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from rlpost.config.groups.base import Group, Positive


def _always(given: bool) -> bool:
    if not given:
        raise ValueError("must be true, there is nothing else")
    return given


Always = Annotated[bool, AfterValidator(_always)]


class PerfConfig(Group):
    """Parallel layout of the trainer and the size of its micro-batches."""

    tensor_model_parallel_size: Positive = 1
    """Tensor-parallel size."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel ranks."""
    pipeline_model_parallel_size: Positive = 1
    """Stages into which the layers are cut."""
    num_layers_per_virtual_pipeline_stage: Positive | None = None
    """Layers of a chunk: each stage then has several and works on them in turn (interleaved pipeline)."""
    decoder_first_pipeline_num_layers: Positive | None = None
    """Layers of the first stage, where the stages are not equal."""
    decoder_last_pipeline_num_layers: Positive | None = None
    """Layers of the last stage, where the stages are not equal."""
    context_parallel_size: Positive = 1
    """Ranks among which every sequence is cut."""
    expert_model_parallel_size: Positive = 1
    """Ranks among which the experts of a layer are spread."""
    expert_tensor_parallel_size: Positive | None = None
    """Ranks among which a single expert is cut; --tensor-model-parallel-size unless given."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers, or only attention, in the backward pass instead of keeping their activations."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers, with full: all in chunks of --recompute-num-layers, or that many of each stage."""
    recompute_num_layers: Positive | None = None
    """Layers of a chunk, or of a stage, that are recomputed."""
    bf16: bool | None = None
    """Compute in bfloat16, with main weights in float32; on GPUs unless given."""
    accumulate_allreduce_grads_in_fp32: bool = True
    """Add up and reduce gradients in float32."""
    attention_softmax_in_fp32: Always = True
    """Softmax of attention in float32; its kernels know nothing else."""
    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Whose modules the layers are made of; TransformerEngine's where it is installed unless given."""
    use_distributed_optimizer: bool = True
    """Shard the state of the optimizer over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass goes on; needs the two above."""
    use_dynamic_batch_size: bool = False
    """Pack samples of different lengths up to --max-tokens-per-gpu instead of --micro-batch-size samples."""
    max_tokens_per_gpu: Positive | None = None
    """Tokens of a micro-batch on one GPU (times the context-parallel size in all); a longer sample is alone in its own
    and never cut."""
    log_probs_max_tokens_per_gpu: Positive | None = None
    """The same limit for passes that only compute log-probs and keep no activations; --max-tokens-per-gpu unless
    given."""
    balance_data: bool = False
    """Deal the samples of a step so that all data-parallel ranks have even work, attention included; otherwise they go
    to the ranks in turn, in their order."""
    micro_batch_size: Positive = 1
    """Samples of a micro-batch without --use-dynamic-batch-size."""
    actor_num_threads: Positive | None = None
    """Threads of an operator that a rank of the trainer runs on the CPU. Unless given, 1; with --optimizer-cpu-offload
    on GPUs an even share of the cores that the job has on the node."""
