"""The table [checkpoint] of a recipe."""

from __future__ import annotations

from rlpost.config.groups.base import FilePath, Group, Positive, PositiveNumber


class CheckpointConfig(Group):
    """Which weights to start from and where to keep the run's own."""

    hf_checkpoint: FilePath = ""
    """Hugging Face folder: weights to start from, tokenizer, architecture for SGLang."""
    ref_load: FilePath | None = None
    """Weights of the reference model, and of the first step of a run that has no checkpoint to resume from:
    a torch_dist folder of tools/convert_hf_to_torch_dist.py, or another Hugging Face folder; --hf-checkpoint unless
    given."""
    load: FilePath | None = None
    """Folder of checkpoints to resume from where --save has none yet; where this has none either the run begins from
    --ref-load."""
    save: FilePath | None = None
    """Folder of checkpoints; RUN/checkpoints unless given."""
    save_interval: Positive | None = None
    """Steps between checkpoints; without it only at the end and at a preemption."""
    async_save: bool = False
    """Write a checkpoint while training goes on; it is committed as soon as it is written. The last one of a run, or
    before it stops, is waited for."""
    save_buffer_gb: PositiveNumber = 4.0
    """Host memory of a rank that a checkpoint passes through on its way to the files. With --async-save an optimizer
    step waits until the state before it has been copied: a buffer as large as the rank's part of a checkpoint avoids
    the wait, a smaller one saves memory."""
    no_save_optim: bool = False
    """Leave the state of the optimizer out of checkpoints: smaller, but Adam starts anew after a resume."""
    keep_last: Positive = 2
    """Committed checkpoints to keep."""
    keep_every: Positive | None = None
    """Keep those of every so many steps for good, besides the last ones."""
    save_hf: FilePath | None = None
    """Hugging Face folder to export the weights to whenever a checkpoint is saved, with {step} (or {rollout_id}) where
    the number of the step goes; it appears when it is whole. Not at a preemption, when time is short."""
    save_deadline_s: PositiveNumber = 1800.0
    """Seconds after which a checkpoint that is waited for counts as failed, and after which an optimizer step no longer
    waits for one in the background, which fails then. Otherwise one in the background has no deadline: a later one is
    put off until it is written."""
