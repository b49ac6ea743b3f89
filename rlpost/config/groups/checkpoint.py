"""The table [checkpoint] of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from rlpost.config.groups.base import (
    FilePath,
    Group,
    JsonTable,
    Positive,
    PositiveNumber,
    variables,
)
from rlpost.config.model_arguments import known_arguments, known_overrides

Overrides = Annotated[dict[str, float], BeforeValidator(variables), AfterValidator(known_overrides)]


class CheckpointConfig(Group):
    """Initial weights, and where the run saves its checkpoints."""

    hf_checkpoint: FilePath = ""
    """Hugging Face folder with the initial weights, the tokenizer and the architecture that SGLang
    loads."""
    model: str | None = None
    """Name in jobs/models, or a config.json: the published one, which describes the model for plan
    and rehearse while the folder of --hf-checkpoint is not here. In a recipe also the line model =
    "NAME" before any table."""
    model_args: Annotated[JsonTable, AfterValidator(known_arguments)] = Field(default={})
    """MODEL_ARGS of a command line for Megatron, each of which must agree with config.json; each is
    also a flag, such as --num-layers 36."""
    override_hf_config: Overrides = Field(default={})
    """NAME=VALUE words that change config.json for the trainer and exports: norm_epsilon,
    rotary_base, rotary_percent, moe_router_topk, moe_router_topk_scaling_factor."""
    ref_load: FilePath | None = None
    """Weights of the reference model, and initial weights of a run that has no checkpoint to resume
    from: a torch_dist folder written by tools/convert_hf_to_torch_dist.py, or a Hugging Face
    folder. Default: --hf-checkpoint."""
    load: FilePath | None = None
    """Folder of checkpoints to resume from while --save has none. If this folder has none either,
    the run starts from --ref-load."""
    save: FilePath | None = None
    """Folder of checkpoints. Default: RUN/checkpoints."""
    save_interval: Positive | None = None
    """Steps between checkpoints. If unset, a checkpoint is saved only at the end and at a
    preemption."""
    async_save: bool = False
    """Write checkpoints in the background while training continues; each is committed as soon as it
    is complete. The run waits for the last one before it exits."""
    save_buffer_gb: PositiveNumber = 4.0
    """Host memory per rank, in GB, that stages a checkpoint on its way to the files. With
    --async-save an optimizer step waits until the state before it has been copied: a buffer as
    large as the rank's shard of the checkpoint avoids the wait, a smaller one saves memory."""
    no_save_optim: bool = False
    """Leave the optimizer state out of checkpoints. They are smaller, but Adam restarts from zero
    moments after a resume."""
    keep_last: Positive = 2
    """Number of most recent committed checkpoints to keep."""
    keep_every: Positive | None = None
    """Also keep every checkpoint whose step is a multiple of this, permanently."""
    save_hf: FilePath | None = None
    """Hugging Face folder to export the weights to at each checkpoint; {step} (or {rollout_id})
    becomes the step number. The folder appears only when it is complete. Skipped at a preemption,
    when time is short."""
    save_deadline_s: PositiveNumber = 1800.0
    """Timeout in seconds for a checkpoint that training waits for, and for an optimizer step that
    waits for a background checkpoint; either wait fails when it expires. Otherwise a background
    checkpoint has no deadline: later ones are postponed until it is written."""

    @property
    def save_buffer_bytes(self) -> int:
        """Host memory of a save in addition to the tensors, in bytes."""
        return int(self.save_buffer_gb * 10**9)
