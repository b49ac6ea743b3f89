"""The table [distillation] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import FilePath, Group, Positive, PositiveNumber


class DistillationConfig(Group):
    """On-policy distillation: a teacher scores the tokens that the policy generated."""

    use_opd: bool = False
    """Add the reverse KL divergence from a teacher at each generated token (docs/distillation.md).
    The teacher must have the tokenizer of --hf-checkpoint."""
    opd_type: Literal["sglang", "megatron"] | None = None
    """Where the teacher is: a server with SGLang's /generate at --opd-teacher-url, or engines of
    --opd-teacher-engines (sglang), or weights of --opd-teacher-load in the trainer (megatron)."""
    opd_kl_coef: Annotated[float, Field(ge=0.0)] = 1.0
    """Coefficient of the divergence. 0 only measures train/opd_reverse_kl."""
    opd_form: Literal["advantage", "loss"] = "advantage"
    """Subtract the divergence from the advantage of each token, as slime does (advantage), or add
    its square, whose gradient is that of the divergence, to the loss (loss)."""
    opd_top_k: Positive | None = None
    """With --opd-form loss: compute the divergence over this many most likely tokens of the teacher
    at each position, and all others together, instead of the generated token alone."""
    opd_alone: bool = False
    """Train on the teacher alone: every advantage of a reward is 0. Rewards are still graded,
    filtered on and reported."""
    opd_teacher_load: FilePath | None = None
    """Weights of a teacher in the trainer: a Hugging Face folder, or a torch_dist folder written by
    tools/convert_hf_to_torch_dist.py. Any supported family and size; it is sharded as the policy
    is."""
    opd_teacher_hf_checkpoint: FilePath | None = None
    """Hugging Face folder with the configuration and the tokenizer of that teacher. Default:
    --opd-teacher-load if that is one, else --hf-checkpoint."""
    opd_teacher_url: str | None = None
    """URL of the teacher's server, such as http://HOST:PORT; /generate is appended if the URL has
    no path."""
    opd_teacher_engines: str | None = None
    """Name of the table [engines.NAME] with the teacher, instead of --opd-teacher-url: engines that
    the job starts, or servers."""
    opd_teacher_timeout_s: PositiveNumber = 300.0
    """Timeout in seconds of one scored response, retries included. A response that cannot be scored
    is left out."""

    @property
    def teacher_in_trainer(self) -> bool:
        """Whether the trainer holds the weights of a teacher."""
        return self.use_opd and self.opd_type == "megatron"

    @property
    def distils_in_loss(self) -> bool:
        """Whether the loss has a term of the divergence from a teacher."""
        return self.use_opd and self.opd_form == "loss"
