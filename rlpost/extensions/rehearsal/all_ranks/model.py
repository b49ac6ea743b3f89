"""The model of a recipe, whether its folder is here or not."""

from __future__ import annotations

from pathlib import Path

from rlpost.config.plan.shape import shape_of
from rlpost.config.tree import Config
from rlpost.trainer.hf_config import hf_config
from rlpost.trainer.model_description import ModelDescription, read_description

POSITIONS = 4096
"""max_position_embeddings without a config.json.

No weight of a rotary embedding depends on it.
"""


def description_of(config: Config) -> ModelDescription:
    """Describe the model by config.json in ``hf_checkpoint`` or, without it, by the table [model].

    Raises WeightError or ConfigError when neither describes a model that can be trained.
    """
    if (Path(config.checkpoint.hf_checkpoint) / "config.json").is_file():
        return read_description(config.checkpoint.hf_checkpoint, config.model.given)
    shape_of(config.model.given)  # names what is missing
    hf = hf_config(config.model.given) | {"max_position_embeddings": POSITIONS}
    return ModelDescription(
        Path(config.checkpoint.hf_checkpoint) / "config.json", hf["architectures"][0], hf
    )
