"""The table [optimizer] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import Group, Positive

NotNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


class OptimizerConfig(Group):
    """Adam, the learning-rate schedule, and the placement of the optimizer state."""

    optimizer: Literal["adam"] = "adam"
    """Optimizer."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    """Peak learning rate, after the warm-up."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    """Learning-rate schedule; WSD holds the rate and decays it over the last --lr-wsd-decay-iters
    steps."""
    lr_decay_iters: Positive | None = None
    """Optimizer steps of the schedule. Default: all steps of the run."""
    lr_warmup_iters: Count = 0
    """Optimizer steps of the warm-up to --lr."""
    lr_warmup_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Warm-up as a fraction of --lr-decay-iters."""
    lr_warmup_init: NotNegative = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay of WSD."""
    lr_wsd_decay_iters: Positive | None = None
    """Optimizer steps of that decay."""
    weight_decay: NotNegative = 0.01
    """Weight decay; not applied to biases and norms."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Weight-decay schedule from --start-weight-decay to --end-weight-decay over the run."""
    start_weight_decay: NotNegative | None = None
    """Weight decay of the first step. Default: --weight-decay."""
    end_weight_decay: NotNegative | None = None
    """Weight decay of the last step. Default: --weight-decay."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Decay rate of the second moment."""
    adam_eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Epsilon of Adam's denominator."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer state in host memory and run the optimizer step there. Without CUDA this
    has no effect."""
    optimizer_offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Fraction of the state to offload."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Overlap the copies of gradients and weights with the optimizer step on the host."""
    use_precision_aware_optimizer: bool = False
    """Store main weights, gradients and moments in the types below; needs TransformerEngine and the
    distributed optimizer. On a GPU --optimizer-cpu-offload implies it, with fp32 throughout."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the main gradients."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Type of the main weights."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Type of the first moment."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Type of the second moment."""
    seed: int = 1234
    """Random seed of the trainer."""
