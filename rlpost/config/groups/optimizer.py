"""The table [optimizer] of a recipe."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlpost.config.groups.base import Group, Positive, several

NotNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


def _compiles(given: str) -> str:
    try:
        re.compile(given)
    except re.error as error:
        raise ValueError(f"write a regular expression ({error})") from None
    return given


Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(_compiles)], ...], BeforeValidator(several)
]


class OptimizerConfig(Group):
    """Adam or Muon, the learning-rate schedule, and the placement of the optimizer state."""

    optimizer: Literal["adam", "muon"] = "adam"
    """Optimizer. muon: Muon for the matrices of the layers, Adam for embeddings, output layer, norms
    and biases; needs --use-distributed-optimizer false (docs/actor.md)."""
    muon_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay rate of Muon's momentum."""
    muon_nesterov: bool = True
    """Use Nesterov momentum in Muon."""
    muon_num_ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz steps of Muon."""
    muon_scale: Literal["match_rms_adam", "original"] = "match_rms_adam"
    """Scale of Muon's updates: 0.2 sqrt(max(out, in)), the size of Adam's with the same --lr, or the
    original sqrt(max(1, out / in))."""
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
    only_train_params_name_list: Patterns = ()
    """Regular expressions, searched in Megatron's names of parameters with layers numbered over the
    whole model: parameters that match none are frozen."""
    freeze_params_name_list: Patterns = ()
    """Regular expressions: parameters that match one are frozen."""
    vision_tower: Literal["frozen", "merger", "all"] = "frozen"
    """Which weights of the encoder of images are trained, with --multimodal-keys: none; its merger
    alone, which projects patches to the language model; or all. A trained encoder computes the
    features of each micro-batch again, instead of once."""
    seed: int = 1234
    """Random seed of the trainer."""
