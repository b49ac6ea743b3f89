"""The settings of a run in one process. Pure, but for reading the recipe.

Input: a recipe and settings by name. Output: the settings with the layout of one device. What has
no effect in one process, or needs what is not there, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlpost.config import pass_through
from rlpost.config.flags import Values, fields, flag, groups
from rlpost.config.load import files_of, load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, suggestion

ONE_DEVICE: Values = {
    "cluster": {
        "nodes": 1,
        "num_gpus_per_node": 2,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "colocate": False,
    },
    "checkpoint": {"save_interval": "none", "save": "none", "load": "none"},
    "perf": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
    },
}
"""What replaces the layout of a recipe: one rank, one engine, no checkpoints."""
ABSENT = {
    "cluster": "there is no job",
    "assets": "nothing is fetched; use rlpost fetch",
    "sglang": "transformers generates in place of SGLang",
    "engines": "there is one engine, of the policy",
    "sync": "weights are copied within the process",
    "wandb": "metrics are returned by step()",
    "observe": "metrics are returned by step()",
}
"""Tables of the core without an effect, and why."""
STARTS = {"hf_checkpoint", "ref_load", "critic_load", "model", "model_args", "override_hf_config"}
"""Keys of [checkpoint] that act: where a run starts; nothing is saved."""
NEVER_ABORTED = {"partial_rollout", "partial_rollout_record_s", "mask_offpolicy_in_partial_rollout"}
REWARDS = {"rm_type", "custom_rm_path", "group_rm", "rm_url"}


def one_process_config(
    recipe: str | Path, settings: Mapping[str, object], *, has_reward: bool = False
) -> Config:
    """Return the settings of ``recipe``, changed by ``settings``, for one process.

    ``has_reward``: a function replaces the reward of the settings. Raises ConfigError.
    """
    changed = _values(settings, has_reward=has_reward)
    merged: Values = {}
    for values in (ONE_DEVICE, changed):
        for group, entries in values.items():
            merged[group] = merged.get(group, {}) | entries
    config = load(files_of(Path(recipe), None), merged).config
    if problems := _problems(config):
        raise ConfigError("\n".join(problems))
    return config


def _values(settings: Mapping[str, object], *, has_reward: bool) -> Values:
    """Return settings by table. Raises ConfigError for unknown ones and those of no effect."""
    owner, values, problems = fields(), Values(), []
    for key, value in settings.items():
        group = owner.get(key) or pass_through.owner(key, ())
        if group is None:
            problems.append(f"{key} = {value!r}: no such setting{suggestion(key, owner)}")
        elif why := _why_idle(group, key, has_reward=has_reward):
            problems.append(
                f"{flag(key)} {value} has no effect in one process: {why}; leave it out"
            )
        else:
            values.setdefault(group, {})[key] = value
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def _why_idle(group: str, key: str, *, has_reward: bool) -> str | None:
    """Return why a setting has no effect; None for one that acts."""
    if key in ONE_DEVICE.get(group, {}) or (group == "checkpoint" and key not in STARTS):
        return "it has one device and saves nothing"
    if key in NEVER_ABORTED:
        return "no answer is aborted"
    if has_reward and key in REWARDS:
        return "the function of reward= is the reward"
    return ABSENT.get(group) or groups()[group].idle_in_process


def _problems(config: Config) -> list[str]:
    """Return what a recipe asks for that one process does not have."""
    grpo, debug = config.grpo, config.debug
    lacking = {
        "--lora-rank": config.lora.lora_rank is not None,
        "--use-opd": config.distillation.use_opd,
        "--use-rollout-routing-replay": grpo.use_rollout_routing_replay,
        "--use-rollout-sampling-mask": grpo.use_rollout_sampling_mask,
        "--multimodal-keys": config.takes_images,
        "--rollout-stop": bool(config.rollout.rollout_stop),
        "[engines]": bool(config.engines.groups),
        "[debug]": bool(debug.changed_keys),
    }
    return [
        f"{name}: a run in one process does not have it; use rlpost submit RECIPE --local"
        for name, is_asked in lacking.items()
        if is_asked
    ]
