"""The settings of ranks in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlpost.algorithm.loss_settings import LossSettings
from rlpost.config.groups.megatron import MegatronConfig
from rlpost.config.tree import Config
from rlpost.config.wording import with_values


def rank_config(
    hf_checkpoint: str | Path, *, megatron: Mapping[str, object] | None = None, **values: object
) -> Config:
    """Return the settings of ranks with one GPU a node, in float32 unless ``values`` differ.

    Args:
        hf_checkpoint: the folder of the model.
        megatron: options of Megatron-core.
        values: settings by name, which are not checked.
    """
    config = Config(megatron=MegatronConfig.model_validate(megatron or {}))
    values = {"num_gpus_per_node": 1, "actor_num_gpus_per_node": 1, "bf16": False, **values}
    return with_values(config, hf_checkpoint=str(hf_checkpoint), **values)


def loss_settings(**values: object) -> LossSettings:
    """Return the settings of a loss, with these leaves."""
    return rank_config("", **values).loss_settings
