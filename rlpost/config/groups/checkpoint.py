"""The table [checkpoint] of a recipe."""

from __future__ import annotations

from rlpost.config.groups.base import FilePath, Group, Positive


class CheckpointConfig(Group):
    """Which weights to start from and where to keep the run's own."""

    hf_checkpoint: FilePath = ""
    """Hugging Face folder: weights to start from, tokenizer, architecture for SGLang."""
    load: FilePath | None = None
    """Folder of checkpoints to resume from; the same as --save unless given."""
    save: FilePath | None = None
    """Folder of checkpoints; RUN/checkpoints unless given."""
    save_interval: Positive | None = None
    """Steps between checkpoints; without it only at the end and at a preemption."""
    keep_last: Positive = 2
    """Committed checkpoints to keep."""
