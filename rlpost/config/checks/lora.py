"""Check the table [lora], and what adapters exclude. Pure.

Input: a ``Config``. Output: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.checks.layout import EXPERT_KEYS
from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.models.families import family_of
from rlpost.models.model_types import HfConfig

ATTENTION = ("linear_qkv", "linear_proj")
"""Targets that are projections of attention."""


def lora_problems(config: Config) -> list[str]:
    """Settings without adapters that need them, and those that adapters exclude."""
    if config.lora.lora_rank is None:
        return _unused(config)
    lora, rank = config.lora, spelled(config, "lora_rank")
    transformer_impl = spelled(config, "transformer_impl")
    rules = [
        (
            config.grpo.enable_mtp_training,
            f"--enable-mtp-training true with {rank}: the layer for multi-token prediction has no adapters; use "
            "--enable-mtp-training false or --lora-rank none",
        ),
        (
            config.perf.transformer_impl == "transformer_engine",
            f"{transformer_impl} with {rank}: adapters are made for Megatron's own linear layers; use "
            "--transformer-impl local or omit it",
        ),
        (
            config.use_critic,
            f"--advantage-estimator ppo with {rank}: the critic trains all of its weights and has no adapters; use "
            "another estimator, or --lora-rank none",
        ),
        (
            config.distillation.opd_teacher_load is not None,
            f"--opd-teacher-load with {rank}: a teacher in the trainer takes the settings of the policy's layers, and "
            "has no adapters; use --opd-type sglang with --opd-teacher-url, or --lora-rank none",
        ),
        (
            config.grpo.ref_update_interval is not None,
            f"{spelled(config, 'ref_update_interval')} with {rank}: the reference is the base, which never changes; "
            "omit one of them",
        ),
        (
            config.grpo.keep_old_actor,
            f"--keep-old-actor true with {rank}: the old policy would be kept without its adapters; use "
            "--keep-old-actor false",
        ),
        (
            config.rollout.update_weights_interval > 1,
            f"{spelled(config, 'update_weights_interval')} with {rank}: the policy of the engines would be kept "
            "without its adapters; use --update-weights-interval 1",
        ),
        (
            len(set(lora.lora_targets)) != len(lora.lora_targets),
            f"{spelled(config, 'lora_targets')} names a target twice; name each once",
        ),
        (
            lora.lora_export == "peft" and "experts" in lora.lora_targets,
            f"--lora-export peft with {spelled(config, 'lora_targets')}: transformers stores the routed experts of a "
            "layer in one tensor, which an adapter of PEFT for a linear layer does not fit; use --lora-export merged, "
            "or --lora-targets without experts",
        ),
        (
            lora.lora_export == "peft" and config.checkpoint.save_hf is None,
            "--lora-export peft without --save-hf: nothing is exported; add --save-hf, or omit --lora-export",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def _unused(config: Config) -> list[str]:
    return [
        f"{spelled(config, key)} has no effect without adapters; add --lora-rank, or omit it"
        for key in config.lora.changed_keys
    ]


def lora_model_problems(config: Config, model: HfConfig) -> list[str]:
    """Architectures without adapters, and targets that the model of this config.json lacks."""
    if config.lora.lora_rank is None:
        return []
    known = family_of(model)
    if known is not None and not known.adapters:
        return [
            f"{spelled(config, 'lora_rank')}: adapters do not exist for the attention or the experts of "
            f"{model['architectures'][0]}; omit it to train all weights"
        ]
    targets = config.lora.lora_targets
    if any(model.get(key) for key in EXPERT_KEYS):
        if config.lora.lora_export == "merged" or set(targets) <= {*ATTENTION, "experts"}:
            return []
        return [
            f"--lora-export peft with {spelled(config, 'lora_targets')}: in a model with routed experts PEFT takes "
            "adapters of gate, up and down projections for those of the experts, and drops the ones of dense layers "
            "and shared experts with a warning; use --lora-targets linear_qkv linear_proj, or --lora-export merged"
        ]
    if "experts" not in targets:
        return []
    return [
        f"{spelled(config, 'lora_targets')}: the model's config.json has no routed experts; use --lora-targets without "
        "experts"
    ]
