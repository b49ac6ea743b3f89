"""The settings of ranks, losses and jobs in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlpost.algorithm.loss_settings import LossSettings
from rlpost.cli.job import SAME_NAME
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.groups.megatron import MegatronConfig
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from slurm.spec import JobSpec


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


def a_job(**values: object) -> JobSpec:
    """Return the job of one node with the settings' own defaults, and these values."""
    defaults = ClusterConfig()
    spec: dict[str, object] = {name: getattr(defaults, name) for name in SAME_NAME}
    spec |= {"nodes": 1, "container": None, "environment": ()}
    return JobSpec(**{**spec, **values})  # type: ignore[arg-type]


def loss_settings(**values: object) -> LossSettings:
    """Return the settings of a loss, with these leaves."""
    return rank_config("", **values).loss_settings
