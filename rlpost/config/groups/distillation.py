"""The table [distillation] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlpost.config.groups.base import Group, Positive, PositiveNumber
from rlpost.config.other_flags import TEACHER_IN_TRAINER


class DistillationConfig(Group):
    """On-policy distillation: a teacher scores the tokens that the policy generated."""

    use_opd: bool = False
    """Add the reverse KL divergence from a teacher at each generated token (docs/distillation.md).
    The teacher must have the tokenizer of --hf-checkpoint."""
    opd_type: Literal["sglang"] | None = None
    """Where the teacher is; engines or servers of SGLang are the only place."""
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
    opd_teacher_url: str | None = None
    """URL of the teacher's server, such as http://HOST:PORT; /generate is appended if the URL has
    no path."""
    opd_teacher_engines: str | None = None
    """Name of the table [engines.NAME] with the teacher, instead of --opd-teacher-url: engines that
    the job starts, or servers."""
    opd_teacher_timeout_s: PositiveNumber = 300.0
    """Timeout in seconds of one scored response, retries included. A response that cannot be scored
    is left out."""

    @field_validator("opd_type", mode="before")
    @classmethod
    def _refuse_a_teacher_in_the_trainer(cls, value: object) -> object:
        if value == "megatron":
            raise ValueError(TEACHER_IN_TRAINER)
        return value

    @property
    def distils_in_loss(self) -> bool:
        """Whether the loss has a term of the divergence from a teacher."""
        return self.use_opd and self.opd_form == "loss"
