"""Architecture and settings of the teacher in the trainer. Imports neither torch nor Megatron.

Input: the settings of the run. Output: those of the teacher, and its architecture.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.config.groups.model import ModelConfig
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.errors import ConfigError
from rlpost.trainer.model_description import ModelDescription, read_description


def teacher_folder(load: str, hf_checkpoint: str | None, policy: str) -> Path:
    """Return the Hugging Face folder with the teacher's configuration and tokenizer.

    Args:
        load: --opd-teacher-load.
        hf_checkpoint: --opd-teacher-hf-checkpoint.
        policy: --hf-checkpoint, whose configuration a torch_dist folder alone has.
    """
    if hf_checkpoint is not None:
        return Path(hf_checkpoint)
    return Path(load) if (Path(load) / "config.json").is_file() else Path(policy)


def teacher_description(config: Config) -> ModelDescription:
    """Read the architecture of the teacher.

    Raises:
        WeightError: the architecture is not supported.
        ConfigError: it cannot be sharded as the policy is.
    """
    own = teacher_config(config)
    description = read_description(own.checkpoint.hf_checkpoint, own.model.given)
    try:
        description.check_layout(own, trains=False)
    except ConfigError as error:
        raise ConfigError(
            f"--opd-teacher-load {config.distillation.opd_teacher_load}: the teacher is sharded as "
            f"the policy is: {error}; or serve it, with --opd-type sglang"
        ) from error
    return description


def teacher_config(config: Config) -> Config:
    """Return the settings of the teacher.

    They have the layout of the policy, and nothing that only training uses.
    """
    distillation, policy = config.distillation, config.checkpoint.hf_checkpoint
    folder = teacher_folder(
        distillation.opd_teacher_load or "", distillation.opd_teacher_hf_checkpoint, policy
    )
    own = config
    if folder != Path(policy):
        own = with_values(
            config.model_copy(update={"model": ModelConfig()}),
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
        )
    return with_values(
        own,
        hf_checkpoint=str(folder),
        loss_type="policy_loss",
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        enable_mtp_training=False,
        use_rollout_routing_replay=False,
        use_routing_replay=False,
    )
