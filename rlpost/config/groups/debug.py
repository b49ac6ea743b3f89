"""The table [debug] of a recipe."""

from __future__ import annotations

from rlpost.config.groups.base import FilePath, Group


class DebugConfig(Group):
    """Recording and replaying generations."""

    save_debug_rollout_data: FilePath | None = None
    """Path with {rollout_id}: write the scored groups of each step there."""
    load_debug_rollout_data: FilePath | None = None
    """Path with {rollout_id}: take the groups of each step from there instead of generating."""
    debug_rollout_only: bool = False
    """Generate and grade only: no trainer is started, nothing is trained or saved."""
    debug_train_only: bool = False
    """Train on recorded groups only: no engine is started, nothing is generated or evaluated; needs
    --load-debug-rollout-data."""
