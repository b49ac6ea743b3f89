"""The groups that have a fleet, and checks of [fleet] and of these groups. Pure.

Input: a ``Config``, the content of the model's config.json. Output: one line for each problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.fleet_name import POLICY
from rlpost.config.checks.engine_model import draft_problems
from rlpost.config.engine_groups import group_config
from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.extensions.fleet.fleet_table import FleetConfig
from rlpost.models.model_types import HfConfig


def fleet_groups(config: Config) -> list[str]:
    """Return the groups that engines of a fleet may join: the policy's, and those with ``fleet``."""
    return [POLICY, *(name for name, group in config.engines.started.items() if group.fleet)]


def engine_jobs(config: Config) -> dict[str, int]:
    """Return the engine jobs that are submitted with the run, by group; none for no jobs."""
    groups = config.engines.groups
    numbers = {
        name: config.table(FleetConfig).engines if name == POLICY else groups[name].engines
        for name in fleet_groups(config)
    }
    return {name: number for name, number in numbers.items() if number}


def fleet_problems(config: Config) -> list[str]:
    """Problems of the settings alone, for the policy's engines."""
    asked = fleet_setting(config)
    if not asked:
        return _no_engine_problems(config)
    return [
        *_no_engine_problems(config),
        *_mode_problems(config, asked),
        *_engine(config, asked),
        *_update_problems(config, asked),
    ]


def group_problems(config: Config) -> list[str]:
    """Problems of the groups with ``fleet = true``."""
    return [line for name in fleet_groups(config)[1:] for line in _group_problems(config, name)]


def _group_problems(config: Config, name: str) -> Iterator[str]:
    """Engines on separate jobs, which have one node each."""
    group, a_node = config.engines.groups[name], config.cluster.num_gpus_per_node
    label = f"[engines.{name}]"
    if group.gpus_per_engine(a_node) > a_node:
        key = f"gpus = {group.gpus}" if group.nodes is None else f"nodes = {group.nodes}"
        yield (
            f"{label} fleet = true and {key}: an engine of a fleet has one node, of "
            f"{spelled(config, 'num_gpus_per_node')}; use gpus = {a_node} or less"
        )
    elif group_config(config, name).sglang.shares_attention:
        yield (
            f"{label} fleet = true and sglang_enable_dp_attention: an engine of a fleet cannot "
            "share attention between replicas; leave one of them out"
        )


def fleet_model_problems(config: Config, hf: HfConfig) -> list[str]:
    """Problems of a fleet with this model."""
    asked = fleet_setting(config)
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


def fleet_setting(config: Config) -> str:
    """The setting that asks for a fleet; empty if none does."""
    fleet = config.table(FleetConfig)
    if fleet.engines:
        return spelled(config, "engines")
    if fleet.min_engines > config.num_engines:
        return spelled(config, "min_engines")
    return ""


def _no_engine_problems(config: Config) -> list[str]:
    """No engine in the run's own job, and nothing that waits for others.

    GPUs for a part of an engine are a problem of the layout.
    """
    has_own = bool(config.rollout_num_gpus or config.sglang.rollout_external_engine_addrs)
    if has_own or config.grpo.is_supervised or config.table(FleetConfig).min_engines:
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


def _update_problems(config: Config, asked: str) -> list[str]:
    """Engines of a fleet read the files of an update."""
    if not config.generates or config.debug.debug_rollout_only:
        return []
    return draft_problems(config, asked)
