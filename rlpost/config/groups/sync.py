"""The table [sync] of a recipe."""

from __future__ import annotations

from typing import Literal

from rlpost.config.groups.base import FilePath, Group, Positive


class SyncConfig(Group):
    """How new weights come from the trainer to the engines."""

    update_weight_buffer_size: Positive = 512 * 1024**2
    """Bytes of one message of weights to the engines."""
    update_weight_transport: Literal["memory", "disk"] = "memory"
    """Over a process group (with --colocate: through memory of the same GPU), or through files that all nodes see."""
    update_weight_disk_dir: FilePath | None = None
    """Folder for those files; RUN/weights unless given."""
