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
    update_weight_mode: Literal["full", "delta"] = "full"
    """Through files: all weights every time, or, after the first time, only the elements that changed. With ``delta``
    the trainer keeps the weights it sent last in host memory, and a copy of the model's folder takes the changes."""
    update_weight_local_checkpoint_dir: FilePath | None = None
    """With ``delta``: folder on a disk of each engine's host for that copy (``/dev/shm`` is one in memory). Unless
    given there is one copy for all engines, beside the files of the updates."""
    update_weight_disk_dir: FilePath | None = None
    """Folder for those files, in which the run makes one with its name; RUN/attempts/K/weights unless given."""
