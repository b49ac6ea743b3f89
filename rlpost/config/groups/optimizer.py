"""The table [optimizer] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import Group


class OptimizerConfig(Group):
    """Adam."""

    optimizer: Literal["adam"] = "adam"
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    """Learning rate."""
    lr_decay_style: Literal["constant"] = "constant"
    """Schedule of the learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Weight decay."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the denominator."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest norm of the gradient; 0 is off."""
    seed: int = 1234
    """Seed of the trainer's random numbers."""
