"""The table [wandb] of a recipe."""

from __future__ import annotations

from typing import Literal

from rlpost.config.groups.base import Group


class WandbConfig(Group):
    """Weights & Biases logging of the metrics in metrics.jsonl. The API key is not a setting: use
    --wandb-key or WANDB_API_KEY."""

    use_wandb: bool = False
    """Log the metrics of each step to Weights & Biases; the nodes need the package wandb."""
    wandb_project: str = "rlpost"
    """Weights & Biases project."""
    wandb_group: str | None = None
    """Weights & Biases group of runs."""
    wandb_team: str | None = None
    """Weights & Biases entity that owns the project. Default: that of the API key."""
    wandb_host: str | None = None
    """URL of a Weights & Biases server. Default: WANDB_BASE_URL, or https://api.wandb.ai."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """offline writes to RUN/wandb for a later `wandb sync`, for nodes without internet access;
    disabled turns logging off."""

    @property
    def is_on(self) -> bool:
        """Whether metrics are logged to Weights & Biases."""
        return self.use_wandb and self.wandb_mode != "disabled"
