"""Check the table [optimizer]: impossible schedules and missing companion settings. Pure.

Input: a ``Config``. Output: one line for each problem, with the numbers.
"""

from __future__ import annotations

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled


def optimizer_problems(config: Config) -> list[str]:
    """Settings that Megatron's scheduler and optimizers reject or silently change."""
    rules = [
        *_rate_rules(config),
        *_decay_rules(config),
        *_memory_rules(config),
        *_dtype_rules(config),
        *_frozen_rules(config),
        *_muon_rules(config),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def _rate_rules(config: Config) -> list[tuple[bool, str]]:
    """The learning rate over the steps."""
    settings, end = config.optimizer, config.lr_decay_iters
    warmup: float = settings.lr_warmup_iters
    if settings.lr_warmup_fraction is not None:
        warmup = settings.lr_warmup_fraction * end
    return [
        (
            settings.min_lr > settings.lr,
            f"{spelled(config, 'min_lr')} is above {spelled(config, 'lr')}; use --min-lr 0, or at most {settings.lr:g}",
        ),
        (
            settings.lr_warmup_init > settings.lr,
            f"{spelled(config, 'lr_warmup_init')} is above {spelled(config, 'lr')}; use --lr-warmup-init 0, or at most "
            f"{settings.lr:g}",
        ),
        (
            settings.lr_warmup_iters > 0 and settings.lr_warmup_fraction is not None,
            f"{spelled(config, 'lr_warmup_iters')} and {spelled(config, 'lr_warmup_fraction')} both give the length of "
            "the warm-up; use --lr-warmup-iters 0 or --lr-warmup-fraction none",
        ),
        (
            settings.lr_decay_style != "constant" and warmup >= end,
            f"{_warmup(config)}: a warm-up of {warmup:g} steps leaves no step of {_end(config)}; use a shorter "
            f"warm-up, such as {_shorter(config)}",
        ),
        (
            settings.lr_decay_style == "WSD" and settings.lr_wsd_decay_iters is None,
            "--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of the decay at the end; add it, for instance "
            f"--lr-wsd-decay-iters {max(1, end // 10)}",
        ),
        (
            (settings.lr_wsd_decay_iters or 0) > end,
            f"{spelled(config, 'lr_wsd_decay_iters')} is more than {_end(config)}; use --lr-wsd-decay-iters "
            f"{max(1, end // 10)}, or at most {end}",
        ),
    ]


def _decay_rules(config: Config) -> list[tuple[bool, str]]:
    """The weight decay over the steps."""
    settings = config.optimizer
    start_decay, end_decay = settings.start_weight_decay, settings.end_weight_decay
    changes = settings.weight_decay_incr_style != "constant"
    low = settings.weight_decay if start_decay is None else start_decay
    high = settings.weight_decay if end_decay is None else end_decay
    both = (("start_weight_decay", start_decay), ("end_weight_decay", end_decay))
    decays = [key for key, value in both if value is not None]
    given_decays = listed([spelled(config, key) for key in decays], "and")
    return [
        (
            changes and low > high,
            f"{spelled(config, 'weight_decay_incr_style')} decreases from --start-weight-decay {low:g} to "
            f"--end-weight-decay {high:g}; use --end-weight-decay {low:g} or more (default: --weight-decay)",
        ),
        (
            not changes and (start_decay is not None or end_decay is not None),
            f"{given_decays} needs --weight-decay-incr-style linear or cosine, and "
            f"{spelled(config, 'weight_decay_incr_style')}; add one, or use "
            f"{' '.join(f'{flag(key)} none' for key in decays)}",
        ),
    ]


def _memory_rules(config: Config) -> list[tuple[bool, str]]:
    """Placement of the optimizer state."""
    settings = config.optimizer
    return [
        (
            settings.use_precision_aware_optimizer and not config.perf.use_distributed_optimizer,
            "--use-precision-aware-optimizer true needs --use-distributed-optimizer; use --use-distributed-optimizer "
            "true",
        ),
        (
            settings.optimizer_cpu_offload and not config.perf.use_distributed_optimizer,
            "--optimizer-cpu-offload true needs --use-distributed-optimizer, as Megatron's HybridDeviceOptimizer does; "
            "use --use-distributed-optimizer true",
        ),
        (
            settings.overlap_cpu_optimizer_d2h_h2d and not settings.optimizer_cpu_offload,
            "--overlap-cpu-optimizer-d2h-h2d true needs --optimizer-cpu-offload; add --optimizer-cpu-offload true, or "
            "use --overlap-cpu-optimizer-d2h-h2d false",
        ),
    ]


def _frozen_rules(config: Config) -> list[tuple[bool, str]]:
    """Parameters that are frozen by name."""
    settings = config.optimizer
    trained, frozen = settings.only_train_params_name_list, settings.freeze_params_name_list
    names = ("only_train_params_name_list", "freeze_params_name_list")
    return [
        (
            bool(trained and frozen),
            f"{spelled(config, names[0])} with {spelled(config, names[1])}: both say which parameters are trained; use "
            "one of them",
        ),
        *(
            (
                bool(getattr(settings, name)) and config.lora.lora_rank is not None,
                f"{spelled(config, name)} with {spelled(config, 'lora_rank')}, which trains adapters alone; use "
                f"--lora-targets, or omit {flag(name)}",
            )
            for name in names
        ),
    ]


def _muon_rules(config: Config) -> list[tuple[bool, str]]:
    """Requirements of Muon."""
    settings = config.optimizer
    is_muon = settings.optimizer == "muon"
    return [
        (
            is_muon and config.perf.use_distributed_optimizer,
            "--optimizer muon with --use-distributed-optimizer true: Muon needs whole matrices, and the distributed "
            "optimizer shards them by element; use --use-distributed-optimizer false",
        ),
        (
            is_muon and config.lora.lora_rank is not None,
            f"--optimizer muon with {spelled(config, 'lora_rank')}: Muon is for the matrices of the model, which are "
            "frozen; use --optimizer adam",
        ),
    ]


def _warmup(config: Config) -> str:
    by_fraction = config.optimizer.lr_warmup_fraction is not None
    return spelled(config, "lr_warmup_fraction" if by_fraction else "lr_warmup_iters")


def _shorter(config: Config) -> str:
    if config.optimizer.lr_warmup_fraction is not None:
        return "--lr-warmup-fraction 0.1"
    return f"--lr-warmup-iters {config.lr_decay_iters // 10}"


def _end(config: Config) -> str:
    """The length of the learning-rate schedule, and the setting it comes from."""
    if config.optimizer.lr_decay_iters is not None:
        return spelled(config, "lr_decay_iters")
    return f"the {config.lr_decay_iters} optimizer steps of {spelled(config, 'num_rollout')}"


def _dtype_rules(config: Config) -> list[tuple[bool, str]]:
    settings = config.optimizer
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    narrow = [name for name in names if getattr(settings, name) != "fp32"]
    return [
        (
            not settings.use_precision_aware_optimizer,
            f"{spelled(config, name)} needs --use-precision-aware-optimizer; add --use-precision-aware-optimizer true, "
            f"or use {flag(name)} fp32",
        )
        for name in narrow
    ] + [
        (
            settings.optimizer_cpu_offload,
            f"{spelled(config, name)} with --optimizer-cpu-offload true, which keeps float32 state in host memory; use "
            f"{flag(name)} fp32 or --optimizer-cpu-offload false",
        )
        for name in narrow
    ]
