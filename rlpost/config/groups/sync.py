"""The table [sync] of a recipe."""

from __future__ import annotations

from typing import Literal

from rlpost.config.groups.base import FilePath, Group, Positive


class SyncConfig(Group):
    """Weight updates from the trainer to the engines."""

    update_weight_buffer_size: Positive = 4 * 1024**3
    """Maximum bytes of a bucket of weights. Within that bound the size follows from the model: at
    least 512 MiB, more where an update would exceed 256 requests; three buckets take at most a
    sixth of a GPU."""
    update_weight_transport: Literal["memory", "slices", "disk"] = "memory"
    """memory: over a process group, or with --colocate through shared GPU memory; every engine rank
    receives all weights. slices: the same, but every engine rank receives only what it holds, from
    the trainer ranks that hold it. disk: through files on a file system that all nodes share."""
    update_weight_mode: Literal["full", "adapter"] = "full"
    """With transport disk: write all weights (full), or the adapters of --lora-rank alone (adapter):
    engines keep the base of --hf-checkpoint and compute the adapters beside it (docs/lora.md)."""
    update_weight_disk_dir: FilePath | None = None
    """Folder of the update files; the run creates a subfolder with its name. Default:
    RUN/attempts/K/weights."""
