"""Flags of Megatron-LM's training program that have no setting or field of the same name. Pure data.

Input: the name of a flag of core_v0.16.1 (megatron/training/arguments.py), without leading dashes.
Output: the field of Megatron-core and the value that it stands for. Extensions answer flags without a
field. All other flags of Megatron-LM are settings, or fields of Megatron-core's dataclasses.
"""

from __future__ import annotations

FALSE_OF_FIELD = {
    "disable-async-tensor-model-parallel-allreduce": "async_tensor_model_parallel_allreduce",
    "disable-clone-scatter-output-in-embedding": "clone_scatter_output_in_embedding",
    "disable-fp8-wgrad": "fp8_wgrad",
    "disable-mamba-mem-eff-path": "use_mamba_mem_eff_path",
    "disable-tp-comm-bulk-dgrad": "tp_comm_bulk_dgrad",
    "disable-tp-comm-bulk-wgrad": "tp_comm_bulk_wgrad",
    "disable-tp-comm-overlap-ag": "tp_comm_overlap_ag",
    "disable-tp-comm-overlap-rs": "tp_comm_overlap_rs",
    "disable-tp-comm-split-ag": "tp_comm_split_ag",
    "disable-tp-comm-split-rs": "tp_comm_split_rs",
    "muon-no-split-qkv": "muon_split_qkv",
    "no-align-param-gather": "align_param_gather",
    "no-async-tensor-model-parallel-allreduce": "async_tensor_model_parallel_allreduce",
    "no-barrier-with-level-1-timing": "barrier_with_L1_time",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-bias-gelu-fusion": "bias_activation_fusion",
    "no-bias-swiglu-fusion": "bias_activation_fusion",
    "no-check-for-nan-in-loss-and-grad": "check_for_nan_in_grad",
    "no-clone-scatter-output-in-embedding": "clone_scatter_output_in_embedding",
    "no-fp8-wgrad": "fp8_wgrad",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-gradient-reduce-div-fusion": "gradient_reduce_div_fusion",
    "no-initialization": "perform_initialization",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-overlap-p2p-communication": "overlap_p2p_comm",
    "no-persist-layer-norm": "persist_layer_norm",
    "no-pin-cpu-grads": "pin_cpu_grads",
    "no-pin-cpu-params": "pin_cpu_params",
    "no-tp-comm-bulk-dgrad": "tp_comm_bulk_dgrad",
    "no-tp-comm-bulk-wgrad": "tp_comm_bulk_wgrad",
    "no-tp-comm-overlap-ag": "tp_comm_overlap_ag",
    "no-tp-comm-overlap-rs": "tp_comm_overlap_rs",
    "no-tp-comm-split-ag": "tp_comm_split_ag",
    "no-tp-comm-split-rs": "tp_comm_split_rs",
}
"""Flag without a value -> the field that it sets to false."""

OTHER_NAME_OF_FIELD = {
    "check-for-nan-in-loss-and-grad": "check_for_nan_in_grad",  # of earlier versions
    "ddp-bucket-size": "bucket_size",
    "ddp-average-in-collective": "average_in_collective",
    "ddp-pad-buckets-for-high-nccl-busbw": "pad_buckets_for_high_nccl_busbw",
    "ddp-reduce-scatter-with-fp32-accumulation": "reduce_scatter_with_fp32_accumulation",
    "fp4-format": "fp4",
    "fp4-param-gather": "fp4_param",
    "fp8-format": "fp8",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "overlap-p2p-communication-warmup-flush": "overlap_p2p_comm_warmup_flush",
    "use-nccl-ub": "nccl_ub",
}
"""Flag -> the field that takes its value."""

OTHER_NAME_OF_SETTING = {"use-gated-attention": "--attention-output-gate"}
"""Flag of slime's patch of Megatron-LM -> the setting that means the same."""

SPECS_OF_FAMILIES = "slime_plugins.models."
"""Modules of ``--spec`` whose layers a family of rlpost has; others are refused."""

SPEC = "the layers are those of the family of config.json in --hf-checkpoint"
"""Why ``--spec`` with such a module has no effect."""
