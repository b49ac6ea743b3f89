"""Check the table [fleet], and runs whose engines are all in the fleet. Pure.

Input: a ``Config``, the content of the model's config.json. Output: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.models.model_types import HfConfig


def fleet_problems(config: Config) -> list[str]:
    """Problems of the settings alone."""
    asked = _asked(config)
    if not asked:
        return _no_engine_problems(config)
    return [*_no_engine_problems(config), *_mode_problems(config, asked), *_engine(config, asked)]


def fleet_model_problems(config: Config, hf: HfConfig) -> list[str]:
    """Problems of a fleet with this model."""
    asked = _asked(config)
    problem = quantised_problem(hf) if asked else None
    return [] if problem is None else [f"{asked}: {problem}"]


def quantised_problem(hf: HfConfig) -> str | None:
    """Why a fleet cannot serve a model; None if it can."""
    method = (hf.get("quantization_config") or {}).get("quant_method")
    if method is None:
        return None
    return (
        f"--hf-checkpoint has {method} weights, but the files that a fleet reads have the trainer's "
        "precision; use a checkpoint in bf16, or engines of the run's own job alone "
        "(--rollout-num-gpus, --engines 0 --min-engines 0)"
    )


def engine_size_problem(config: Config) -> str | None:
    """Why the engines' size or settings do not fit an engine job; None if they do."""
    cluster = config.cluster
    if cluster.rollout_num_gpus_per_engine > cluster.num_gpus_per_node:
        return (
            f"{spelled(config, 'rollout_num_gpus_per_engine')} is more than "
            f"{spelled(config, 'num_gpus_per_node')}, and an engine of a fleet has one node; use at "
            f"most {cluster.num_gpus_per_node}"
        )
    if config.sglang.shares_attention:
        return (
            "--sglang-enable-dp-attention: an engine of a fleet cannot share attention between "
            "replicas; leave it out"
        )
    return None


def _asked(config: Config) -> str:
    """The setting that asks for a fleet; empty if none does."""
    if config.fleet.engines:
        return spelled(config, "engines")
    if config.fleet.min_engines > config.num_engines:
        return spelled(config, "min_engines")
    return ""


def _no_engine_problems(config: Config) -> list[str]:
    """No engine in the run's own job, and nothing that waits for others.

    GPUs for a part of an engine are a problem of the layout.
    """
    has_own = bool(config.rollout_num_gpus or config.sglang.rollout_external_engine_addrs)
    if has_own or config.grpo.is_supervised or config.fleet.min_engines:
        return []
    return [
        f"{spelled(config, 'rollout_num_gpus')}: no engine is in the run's own job, and "
        f"{spelled(config, 'min_engines')} waits for none of a fleet; use --min-engines 1 with "
        f"--engines, or --rollout-num-gpus {config.cluster.rollout_num_gpus_per_engine}"
    ]


def _mode_problems(config: Config, asked: str) -> list[str]:
    """Modes without a trainer that writes weights, or without generation."""
    debug = config.debug
    rules = [
        (config.grpo.is_supervised, "--loss-type sft_loss generates nothing"),
        (debug.debug_rollout_only, "--debug-rollout-only has no trainer that writes weights"),
        (debug.debug_train_only, "--debug-train-only generates nothing"),
    ]
    return [
        f"{asked}: {why}; use --engines 0 --min-engines 0" for is_broken, why in rules if is_broken
    ]


def _engine(config: Config, asked: str) -> list[str]:
    problem = engine_size_problem(config)
    return [] if problem is None else [f"{asked}: {problem}"]
