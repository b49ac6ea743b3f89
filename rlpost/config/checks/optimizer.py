"""Arithmetic checks of the table [optimizer], pure: schedules that cannot be, and settings that need others.

In: a ``Config``. Out: one line for each problem with the numbers.
"""

from __future__ import annotations

from rlpost.config.tree import Config


def optimizer_problems(config: Config) -> list[str]:
    """What Megatron's scheduler and optimizers would refuse, or quietly do otherwise."""
    given, end = config.optimizer, config.lr_decay_iters
    warmup = given.lr_warmup_iters if given.lr_warmup_fraction is None else given.lr_warmup_fraction * end
    start_decay, end_decay = given.start_weight_decay, given.end_weight_decay
    changes = given.weight_decay_incr_style != "constant"
    low = given.weight_decay if start_decay is None else start_decay
    high = given.weight_decay if end_decay is None else end_decay
    rules = [
        (given.min_lr > given.lr, f"min_lr = {given.min_lr} is above lr = {given.lr}"),
        (given.lr_warmup_init > given.lr, f"lr_warmup_init = {given.lr_warmup_init} is above lr = {given.lr}"),
        (
            given.lr_warmup_iters > 0 and given.lr_warmup_fraction is not None,
            f"lr_warmup_iters = {given.lr_warmup_iters} and lr_warmup_fraction = {given.lr_warmup_fraction} are two "
            "words for one thing; give one",
        ),
        (
            given.lr_decay_style != "constant" and warmup >= end,
            f"a warm-up of {warmup:g} steps leaves nothing of lr_decay_iters = {end}; shorten it",
        ),
        (
            given.lr_decay_style == "WSD" and given.lr_wsd_decay_iters is None,
            "lr_decay_style = WSD needs lr_wsd_decay_iters (steps of the fall at the end)",
        ),
        (
            (given.lr_wsd_decay_iters or 0) > end,
            f"lr_wsd_decay_iters = {given.lr_wsd_decay_iters} is more than lr_decay_iters = {end}",
        ),
        (changes and low > high, f"start_weight_decay = {low} is above end_weight_decay = {high}"),
        (
            not changes and (start_decay is not None or end_decay is not None),
            "start_weight_decay and end_weight_decay need weight_decay_incr_style = linear or cosine",
        ),
        (
            given.use_precision_aware_optimizer and not config.perf.use_distributed_optimizer,
            "use_precision_aware_optimizer needs perf.use_distributed_optimizer",
        ),
        (
            given.optimizer_cpu_offload and not config.perf.use_distributed_optimizer,
            "optimizer_cpu_offload needs perf.use_distributed_optimizer (Megatron's HybridDeviceOptimizer does)",
        ),
        (
            given.overlap_cpu_optimizer_d2h_h2d and not given.optimizer_cpu_offload,
            "overlap_cpu_optimizer_d2h_h2d needs optimizer_cpu_offload",
        ),
        *_dtype_rules(config),
    ]
    return [f"optimizer.{problem}" for broken, problem in rules if broken]


def _dtype_rules(config: Config) -> list[tuple[bool, str]]:
    given = config.optimizer
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    narrow = [name for name in names if getattr(given, name) != "fp32"]
    return [
        (
            not given.use_precision_aware_optimizer,
            f"{name} = {getattr(given, name)} needs use_precision_aware_optimizer",
        )
        for name in narrow
    ] + [
        (
            given.optimizer_cpu_offload,
            f"{name} = {getattr(given, name)}: optimizer_cpu_offload keeps float32 in host memory; give fp32 or leave "
            "optimizer_cpu_offload out",
        )
        for name in narrow
    ]
