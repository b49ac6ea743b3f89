"""The table [optimizer] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import Group, Positive

NotNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


class OptimizerConfig(Group):
    """Adam, its learning rate and where its state lies."""

    optimizer: Literal["adam"] = "adam"
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    """Learning rate, after the warm-up."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of a decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """How the learning rate falls; WSD holds it and lets it fall in the last --lr-wsd-decay-iters."""
    lr_decay_iters: Positive | None = None
    """Optimizer steps until it has fallen; all steps of the run unless given."""
    lr_warmup_iters: Count = 0
    """Optimizer steps over which it rises to --lr."""
    lr_warmup_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """The same as a part of --lr-decay-iters."""
    lr_warmup_init: NotNegative = 0.0
    """Learning rate at which the warm-up begins."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """How it falls at the end of WSD."""
    lr_wsd_decay_iters: Positive | None = None
    """Optimizer steps of that fall."""
    weight_decay: NotNegative = 0.01
    """Weight decay; biases and norms are never decayed."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay changes from --start-weight-decay to --end-weight-decay over the run."""
    start_weight_decay: NotNegative | None = None
    """Weight decay of the first step; --weight-decay unless given."""
    end_weight_decay: NotNegative | None = None
    """Weight decay of the last step; --weight-decay unless given."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the denominator."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest norm of the gradient; 0 is off."""
    optimizer_cpu_offload: bool = False
    """Keep the state of the optimizer in host memory and step there; without CUDA it is there anyway."""
    optimizer_offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """The part that is kept there."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients and weights while the host steps."""
    use_precision_aware_optimizer: bool = False
    """Keep main weights, gradients and moments in the types below, for which it needs TransformerEngine and the
    distributed optimizer. On a GPU --optimizer-cpu-offload implies it, all in fp32."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the gradients there."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Type of the main weights there."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Type of the first moment there."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Type of the second moment there."""
    seed: int = 1234
    """Seed of the trainer's random numbers."""
