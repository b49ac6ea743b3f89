"""The settings that custom functions read: by flag name, with the values that slime derives. Pure."""

from __future__ import annotations

from rlpost.config.tree import Config


def settings_of(config: Config) -> dict[str, object]:
    """Return all settings in one table, as JSON values; for example ``{"lr": 1e-6, ...}``."""
    settings: dict[str, object] = {}
    # groups of engines have names of the user's, which are no settings
    for table in config.model_dump(mode="json", exclude={"engines"}).values():
        settings |= table
    rollout = config.rollout
    sources = list(rollout.prompt_data)
    derived = {
        "prompt_data": sources[0] if len(sources) == 1 else sources,
        "rollout_stop": list(rollout.rollout_stop) or None,
        "rollout_stop_token_ids": list(rollout.rollout_stop_token_ids) or None,
        "over_sampling_batch_size": rollout.over_sampling_batch_size or rollout.rollout_batch_size,
        "num_steps_per_rollout": config.num_steps_per_rollout,
        "global_batch_size": config.samples_per_rollout // config.num_steps_per_rollout,
        "rollout_num_gpus": config.rollout_num_gpus,
        "rollout_num_engines": config.num_engines + config.num_joining_engines,
        "actor_num_nodes": config.actor_num_nodes,
        "eval_max_context_len": config.eval.eval_max_context_len or rollout.rollout_max_context_len,
        "eval_reward_key": config.eval.eval_reward_key or rollout.reward_key,
        "eps_clip": config.loss_settings.eps_clip,
        "eps_clip_high": config.loss_settings.eps_clip_high,
        "rollout_global_dataset": True,
        "rollout_skip_special_tokens": False,
        "ci_test": False,
    }
    sglang = {
        "sglang_dp_size": 1,
        "sglang_enable_deterministic_inference": False,
        "sglang_speculative_algorithm": None,
    }
    return {**sglang, **settings, **derived}
