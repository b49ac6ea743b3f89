"""The table [checkpoint] of a recipe."""

from __future__ import annotations

from rlpost.config.groups.base import FilePath, Group, Positive


class CheckpointConfig(Group):
    """Which weights to start from and where to keep the run's own."""

    hf_checkpoint: FilePath = ""
    """Hugging Face folder: weights to start from, tokenizer, architecture for SGLang."""
    ref_load: FilePath | None = None
    """Weights of the reference model, and of the first step of a run that has no checkpoint to resume from:
    a torch_dist folder of tools/convert_hf_to_torch_dist.py, or another Hugging Face folder; --hf-checkpoint unless
    given."""
    load: FilePath | None = None
    """Folder of checkpoints to resume from; the same as --save unless given."""
    save: FilePath | None = None
    """Folder of checkpoints; RUN/checkpoints unless given."""
    save_interval: Positive | None = None
    """Steps between checkpoints; without it only at the end and at a preemption."""
    async_save: bool = False
    """Copy a checkpoint to host memory and write it while training goes on; it is committed as soon as it is written.
    The last one of a run, or before it stops, is waited for."""
    no_save_optim: bool = False
    """Leave the state of the optimizer out of checkpoints: smaller, but Adam starts anew after a resume."""
    keep_last: Positive = 2
    """Committed checkpoints to keep."""
