"""The table [critic] of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpost.config.groups.base import FilePath, Group, PositiveNumber

Count = Annotated[int, Field(ge=0)]


class CriticConfig(Group):
    """The value model of --advantage-estimator ppo (docs/ppo.md), on the policy's ranks."""

    value_clip: PositiveNumber | None = 0.2
    """The critic's loss does not reward a value that has moved further than this from that before
    the update; none: no clipping."""
    num_critic_only_steps: Count = 0
    """Rollouts at the start of a run that train the critic alone."""
    critic_load: FilePath | None = None
    """Initial weights of the critic: a Hugging Face folder or a torch_dist folder of the policy's
    architecture, with a value head (an exported critic) or without. Default: --ref-load, else
    --hf-checkpoint. A new head is random."""
    critic_lr: PositiveNumber | None = None
    """Peak learning rate of the critic. Default: --lr. Schedule, weight decay and betas are those
    of [optimizer]."""
    critic_lr_warmup_iters: Count = 0
    """Optimizer steps of the critic's warm-up from 0."""
