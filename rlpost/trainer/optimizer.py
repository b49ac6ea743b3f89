"""Megatron's data-parallel wrapper and Adam of a rank, in the configured precision.

Input: the chunks of the model and the settings. Output: the wrapped chunks and the optimizer,
connected through Megatron's configuration. With bfloat16 weights Adam updates float32 main weights,
which checkpoints contain. Gradients are accumulated in float32 unless that is disabled.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from rlpost.algorithm.guards import check_finite
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, Interrupted
from rlpost.observe.spans import span
from rlpost.trainer import device, random_state, step
from rlpost.trainer.kept_weights import host_copies
from rlpost.trainer.layer_specs import has_transformer_engine
from rlpost.trainer.megatron_fields import configured
from rlpost.trainer.torch_dist.optimizer_state import inner

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
"""Dtypes as TransformerEngine's Adam expects them; fp8 is stored as uint8 with a separate scale."""


def wrap(chunks: Sequence[torch.nn.Module], config: Config) -> list[DistributedDataParallel]:
    """Wrap the chunks with gradient buffers, which are summed over the data-parallel ranks."""
    ddp_config = configured(DistributedDataParallelConfig, config.megatron.options)(
        grad_reduce_in_fp32=config.perf.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=config.perf.use_distributed_optimizer,
        overlap_grad_reduce=config.perf.overlap_grad_reduce,
        overlap_param_gather=config.perf.overlap_param_gather,
    )
    # As in Megatron-LM: the reduction of later chunks overlaps with computation anyway.
    return [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def build(model: Sequence[DistributedDataParallel], config: Config) -> ChainedOptimizer:
    """Build Adam over the wrapped chunks.

    Raises:
        ConfigError: the precision needs a package or device that is missing.
    """
    adam = optimizer_config(config)
    # Without gradients, shards of float32 weights are leaves, as HybridDeviceOptimizer needs.
    with torch.set_grad_enabled(not adam.optimizer_cpu_offload):
        optimizer = get_megatron_optimizer(adam, list(model))
    for one in inner(optimizer):
        if isinstance(one, DistributedOptimizer):
            _number_weights(one)
        if isinstance(one.optimizer, HybridDeviceOptimizer):
            pin_weights(one.optimizer)
            one.optimizer.register_step_pre_hook(_set_float32_gradients)
        update_one_by_one(one.optimizer)
    transformer = model[0].config
    transformer.finalize_model_grads_func = step.finalize_summed_grads
    # A weak reference. Otherwise Megatron's configuration keeps the optimizer, and through it the
    # model and the process groups, until the process ends: the cycle passes through autograd's nodes,
    # which gc does not traverse.
    held = weakref.proxy(optimizer)
    transformer.grad_scale_func = lambda loss: held.scale_loss(loss)
    if config.perf.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return optimizer


def _number_weights(optimizer: DistributedOptimizer) -> None:
    """Number the weights of each parameter group as they are in the group: float32 ones first.

    Megatron-core 0.16.1 numbers them before it sorts them by type, and would save the main weight and
    the moments of another weight (NVIDIA/Megatron-LM#2777).
    """
    pairs = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for index, (float32, float16) in enumerate(pairs):
        for order, weight in enumerate([*float32, *float16]):
            optimizer.model_param_group_index_map[weight] = index, order


def _set_float32_gradients(optimizer: HybridDeviceOptimizer, *_: object) -> None:
    """Set ``grad`` of float32 weights, which HybridDeviceOptimizer leaves unset on the GPU.

    It copies ``decoupled_grad`` only to weights in host memory, and to float32 copies of others
    (``_set_sub_optimizer_grads`` of 0.16.1): without it these weights would never change.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.dtype == torch.float32:
                weight.grad = weight.decoupled_grad


def update_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's AdamW, which Megatron takes without TransformerEngine, update weight by weight.

    On CUDA it would update all at once, with 4 bytes for each parameter beside its state.
    """
    if isinstance(optimizer, torch.optim.AdamW):
        for group in optimizer.param_groups:
            group["foreach"] = False


def pin_weights(optimizer: HybridDeviceOptimizer) -> None:
    """Move the float32 weights of an optimizer in host memory to pinned memory.

    Each step copies them to the GPU, which is several times slower from pageable memory. Megatron
    pins a copy in bfloat16 and converts it to pageable float32 (``hybrid_optimizer.py`` of 0.16.1,
    ``_get_sub_optimizer_param_groups``). Adam has no state yet, so this needs no more host memory
    than a step.
    """
    weights = [weight.data for weight in optimizer.cpu_copys_map_gpu_param]
    copies = host_copies(weights, is_pinned=torch.cuda.is_available())
    for weight, copy in zip(optimizer.cpu_copys_map_gpu_param, copies, strict=True):
        weight.data = copy.copy_(weight.data)


def accumulate(
    model: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    gradients: Callable[[], dict[str, float]],
    *,
    norm: str,
    where: str,
    with_mtp: bool = False,
) -> dict[str, float]:
    """Clear the gradients, accumulate those of ``gradients``, and prepare them for ``update``.

    Returns:
        The metrics of ``gradients``, and under the name ``norm`` the norm of all gradients; equal
        on every rank.

    Raises:
        TrainingError: a metric or a gradient is not finite, with ``with_mtp`` also one of the layer
            for multi-token prediction; ``where`` names step and loss. Raised on every rank alike;
            weights and optimizer are unchanged.
        Interrupted: ``gradients`` was; random generators are unchanged, the gradients cleared.
    """
    _zero_grad(model, optimizer)
    before = random_state.collect()
    try:
        metrics = gradients()
    except Interrupted:
        _zero_grad(model, optimizer)
        random_state.restore(before)
        raise
    with span("gradient norm"), torch.no_grad():
        optimizer.prepare_grads()
        metrics[norm] = float(optimizer.get_grad_norm())
        check_finite(metrics, where)
        if with_mtp:
            check_finite({"gradient of --enable-mtp-training": _excluded_norm(optimizer)}, where)
    return metrics


def _excluded_norm(optimizer: ChainedOptimizer) -> float:
    """Return the norm of the gradients that ``get_grad_norm`` excludes; equal on every rank.

    Only for the check that it is finite: copies of tied embeddings count as well.
    """
    total = 0.0
    for part in optimizer.chained_optimizers:
        attribute = "grad"
        if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            attribute = "decoupled_grad"
        excluded = [one for one in part.get_parameters() if getattr(one, "shared", False)]
        grads = [grad for one in excluded if (grad := getattr(one, attribute, None)) is not None]
        total += get_grad_norm_fp32(
            grads, grad_stats_parallel_group=part.get_grad_stats_parallel_group()
        )
    return total


@torch.no_grad()
def update(optimizer: ChainedOptimizer, norm: float) -> None:
    """Clip the gradients, whose norm is ``norm``, and change the weights; after ``accumulate``.

    The second half of Megatron's ``ChainedOptimizer.step`` (``optimizer.py`` of 0.16.1), which does
    not look at the norm.
    """
    with span("optimizer"):
        for part in optimizer.chained_optimizers:
            settings, parameters = part.config, part.get_parameters()
            if settings.clip_grad > 0.0 and parameters:
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=settings.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        optimizer.step_with_ready_grads()


def _zero_grad(model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def finish_param_sync(model: Sequence[DistributedDataParallel], config: Config) -> None:
    """Wait for overlapped parameter gathers; call before reading weights.

    With ``overlap_param_gather`` they would otherwise complete in the next forward pass.
    """
    if config.perf.overlap_param_gather:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)


def optimizer_config(config: Config) -> OptimizerConfig:
    """Megatron's settings of Adam.

    Raises:
        ConfigError: the precision needs a package or device that is missing.
    """
    dtype = device.weight_dtype(config.perf.bf16)
    placement = _placement(config)
    is_hybrid = bool(placement)
    if is_hybrid:
        _check_hybrid(config, dtype)
    precision = {} if is_hybrid else _precision(config)
    table = config.optimizer
    adam = configured(OptimizerConfig, config.megatron.options)(
        optimizer="adam",
        lr=table.lr,
        weight_decay=table.weight_decay,
        adam_beta1=table.adam_beta1,
        adam_beta2=table.adam_beta2,
        adam_eps=table.adam_eps,
        clip_grad=table.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=config.perf.use_distributed_optimizer,
        overlap_param_gather=config.perf.overlap_param_gather,
        **placement,
        **precision,
    )
    return _laid_out_for_hybrid(adam) if is_hybrid else adam


def _laid_out_for_hybrid(adam: OptimizerConfig) -> OptimizerConfig:
    """Select the gradient layout of HybridDeviceOptimizer, without TransformerEngine.

    ``use_precision_aware_optimizer`` selects that layout, so it is always set (Megatron-LM's command
    line rejects one flag without the other). The state of this optimizer is float32.

    With ``use_precision_aware_optimizer`` the constructor of Megatron-core 0.16.1 queries
    TransformerEngine's version, and raises TypeError without it (``optimizer_config.py:383``,
    ``utils.py:346``), before it checks for CPU offload and returns. So the fields are set here as
    it would set them for a version below 2.1: without weight remainders, an encoding of
    TransformerEngine's Adam.
    """
    adam.use_precision_aware_optimizer = True
    adam.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    adam.store_param_remainders = False
    return adam


def _placement(config: Config) -> dict[str, object]:
    """CPU offload fields. Megatron's HybridDeviceOptimizer needs CUDA and host memory."""
    if not config.optimizer.optimizer_cpu_offload:
        return {}
    if not torch.cuda.is_available():
        logger.warning(
            "--optimizer-cpu-offload has no effect without CUDA: the optimizer is in host memory"
        )
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": config.optimizer.optimizer_offload_fraction,
        "overlap_cpu_optimizer_d2h_h2d": config.optimizer.overlap_cpu_optimizer_d2h_h2d,
    }


def _check_hybrid(config: Config, dtype: torch.dtype) -> None:
    """Check the settings that HybridDeviceOptimizer excludes; raises ConfigError."""
    if not config.perf.use_distributed_optimizer:
        raise ConfigError(
            "--optimizer-cpu-offload on a GPU needs --use-distributed-optimizer true; "
            "set it, or omit --optimizer-cpu-offload"
        )
    if config.optimizer.use_precision_aware_optimizer:
        _check_state_is_float32(config)
    if dtype != torch.bfloat16:
        # Megatron-core 0.16.1 gives it views of leaves, not leaves (distrib_optimizer.py). ``build``
        # avoids that for the few float32 weights of a model in bfloat16; no test has them alone.
        raise ConfigError(
            "--optimizer-cpu-offload true needs weights in bfloat16: Megatron's "
            "HybridDeviceOptimizer does not support float32; set --bf16 true or omit --optimizer-cpu-offload"
        )


def _check_state_is_float32(config: Config) -> None:
    """Raise ConfigError if a dtype of Adam's state is not float32."""
    other = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in _state_dtypes(config).items()
        if value != "fp32"
    ]
    if other:
        raise ConfigError(
            f"--use-precision-aware-optimizer with {', '.join(other)} needs CUDA and TransformerEngine, and excludes "
            "--optimizer-cpu-offload, whose state is float32; use fp32 for all of them or omit the flag"
        )


def _precision(config: Config) -> dict[str, object]:
    """Fields for the dtypes of Adam's state, where it supports others than float32.

    Raises ConfigError where it does not, and they are set.
    """
    if not config.optimizer.use_precision_aware_optimizer:
        return {}
    if torch.cuda.is_available() and has_transformer_engine():
        dtypes = {name: DTYPES[value] for name, value in _state_dtypes(config).items()}
        return {"use_precision_aware_optimizer": True} | dtypes
    _check_state_is_float32(config)
    logger.warning("--use-precision-aware-optimizer has no effect: all its dtypes are fp32")
    return {}


def _state_dtypes(config: Config) -> dict[str, str]:
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return {name: getattr(config.optimizer, name) for name in names}


def apply_schedule(optimizer: MegatronOptimizer, config: Config, num_steps: int) -> float:
    """Set learning rate and weight decay for the step after ``num_steps``.

    Norms and biases are not decayed: Megatron sets ``wd_mult`` for them but ignores it. Betas and
    epsilon are set too, because TransformerEngine's Adam restores those of a checkpoint.

    Returns:
        The learning rate.
    """
    table = config.optimizer
    lr, decay = learning_rate(config, num_steps), weight_decay(config, num_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = decay * group.get("wd_mult", 1.0)
        group["betas"], group["eps"] = (table.adam_beta1, table.adam_beta2), table.adam_eps
    return lr


def learning_rate(config: Config, num_steps: int) -> float:
    """Return the learning rate after ``num_steps`` optimizer steps.

    There is no other state: a resumed run has the values of an uninterrupted one, and a changed
    schedule takes effect at once. The curves are those of Megatron-core's
    ``OptimizerParamScheduler``; warmup starts exactly at ``lr_warmup_init``.
    """
    table = config.optimizer
    lr, low = table.lr, table.min_lr
    warmup, end = _warmup_iters(config), config.lr_decay_iters
    if warmup > 0 and num_steps <= warmup:
        return table.lr_warmup_init + (lr - table.lr_warmup_init) * num_steps / warmup
    if table.lr_decay_style == "constant":
        return lr
    if num_steps > end:
        return low
    if table.lr_decay_style == "inverse-square-root":
        return max(low, lr * math.sqrt(max(warmup, 1) / max(num_steps, 1)))
    if table.lr_decay_style == "WSD":
        fall = table.lr_wsd_decay_iters or end
        part, shape = (num_steps - (end - fall)) / fall, table.lr_wsd_decay_style
    else:
        part, shape = (num_steps - warmup) / (end - warmup), table.lr_decay_style
    return low + _height(shape, max(part, 0.0)) * (lr - low)


def weight_decay(config: Config, num_steps: int) -> float:
    """Return the weight decay after ``num_steps`` optimizer steps."""
    table = config.optimizer
    if table.weight_decay_incr_style == "constant":
        return table.weight_decay
    start, end = table.start_weight_decay, table.end_weight_decay
    if start is None:
        start = table.weight_decay
    if end is None:
        end = table.weight_decay
    part = min(num_steps / config.lr_decay_iters, 1.0)
    return end - _height(table.weight_decay_incr_style, part) * (end - start)


def _warmup_iters(config: Config) -> float:
    if config.optimizer.lr_warmup_fraction is not None:
        return config.optimizer.lr_warmup_fraction * config.lr_decay_iters
    return config.optimizer.lr_warmup_iters


def _height(shape: str, part: float) -> float:
    """Return the decay factor: 1 at ``part`` = 0, 0 at ``part`` = 1.

    Sources of the shapes for WSD: arXiv 2404.06395 and 2405.18392.
    """
    heights = {
        "linear": lambda: 1.0 - part,
        "cosine": lambda: 0.5 * (math.cos(math.pi * part) + 1.0),
        "exponential": lambda: 2.0 * 0.5**part - 1.0,
        "minus_sqrt": lambda: 1.0 - math.sqrt(part),
    }
    return heights[shape]()
