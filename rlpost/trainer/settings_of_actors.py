"""Derives the settings of an actor from those of a run. Pure.

Input: the settings of a run. Output: the flat settings of every actor rank.
"""

from __future__ import annotations

import dataclasses

from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.config.flags import fields
from rlpost.config.tree import Config
from rlpost.trainer.settings import ActorSettings


def actor_settings(config: Config) -> ActorSettings:
    """Return an actor's settings: settings of the same name in any table, and derived ones."""
    names = {field.name for field in dataclasses.fields(ActorSettings)}
    leaves = {
        key: getattr(getattr(config, group), key) for key, group in fields().items() if key in names
    }
    grpo, model_values = config.grpo, config.model.model_dump()
    derived = {
        "temperature": config.rollout.rollout_temperature,
        "num_engines": config.num_engines,
        "policy_loss": grpo.policy_loss or ESTIMATORS[grpo.advantage_estimator].loss,
        "eps_clip_high": grpo.eps_clip if grpo.eps_clip_high is None else grpo.eps_clip_high,
        "keeps_old_policy": config.keeps_old_policy,
        "lr_decay_iters": config.lr_decay_iters,
        "model_args": {key: value for key, value in model_values.items() if value is not None},
        "megatron": config.megatron.options,
        "use_critic": config.use_critic and not config.has_own_critic,
    }
    return ActorSettings(**(leaves | derived))
