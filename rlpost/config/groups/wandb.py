"""The table [wandb] of a recipe."""

from __future__ import annotations

from typing import Literal

from rlpost.config.groups.base import Group


class WandbConfig(Group):
    """Weights & Biases: the numbers of metrics.jsonl once more, on its site. The key is no setting: --wandb-key or
    WANDB_API_KEY."""

    use_wandb: bool = False
    """Send the metrics of each step to Weights & Biases; the nodes need the package wandb."""
    wandb_project: str = "rlpost"
    """Project there."""
    wandb_group: str | None = None
    """Group of runs there."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """offline: into RUN/wandb only, for `wandb sync` later, where nodes have no way out; disabled: not at all."""

    @property
    def is_on(self) -> bool:
        """Whether a writer is wanted."""
        return self.use_wandb and self.wandb_mode != "disabled"
