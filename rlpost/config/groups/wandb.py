"""The table [wandb] of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator

from rlpost.config.groups.base import Group

MAX_LENGTH = 128
"""Of the names of projects, groups and runs in Weights & Biases."""
_NOT_IN_PROJECTS = "/\\#?%:"
_IN_ENVIRONMENT: Mapping[str, Literal["offline", "disabled"]] = {
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def _name(given: str) -> str:
    if not 1 <= len(given) <= MAX_LENGTH:
        raise ValueError(f"has {len(given)} characters; W&B takes 1 to {MAX_LENGTH}")
    return given


def _project(given: str) -> str:
    if wrong := [letter for letter in _NOT_IN_PROJECTS if letter in given]:
        raise ValueError(f"contains {wrong[0]!r}; W&B takes none of {' '.join(_NOT_IN_PROJECTS)}")
    return given


def _host(given: str) -> str:
    if not given.startswith(("http://", "https://")):
        raise ValueError(f"has no scheme; write https://{given}")
    return given


Name = Annotated[str, AfterValidator(_name)]


class WandbConfig(Group):
    """Weights & Biases logging of the metrics in metrics.jsonl. The API key is not a setting: use
    --wandb-key or WANDB_API_KEY."""

    use_wandb: bool = False
    """Log the metrics of each step to Weights & Biases; the nodes need the package wandb."""
    wandb_project: Annotated[Name, AfterValidator(_project)] = "rlpost"
    """Weights & Biases project."""
    wandb_group: Name | None = None
    """Weights & Biases group of runs."""
    wandb_team: str | None = None
    """Weights & Biases entity that owns the project. Default: that of the API key."""
    wandb_host: Annotated[str, AfterValidator(_host)] | None = None
    """URL of a Weights & Biases server. Default: WANDB_BASE_URL, or https://api.wandb.ai."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """offline writes to RUN/wandb for a later `wandb sync`, for nodes without internet access;
    disabled turns logging off. WANDB_MODE in the environment may do the same to online."""

    @property
    def is_on(self) -> bool:
        """Whether metrics are logged to Weights & Biases."""
        return self.use_wandb and self.wandb_mode != "disabled"

    def mode_in(self, environ: Mapping[str, str]) -> Literal["online", "offline", "disabled"]:
        """Return the mode of a process; WANDB_MODE turns online into offline or disabled."""
        asked = _IN_ENVIRONMENT.get(environ.get("WANDB_MODE", "").strip().lower())
        return asked if asked and self.wandb_mode == "online" else self.wandb_mode
