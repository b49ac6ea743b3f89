"""The table [grpo] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import Group


class GrpoConfig(Group):
    """The algorithm."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    """Advantages: rewards less their group's mean, over its standard deviation (grpo; gspo and cispo use them with the
    ratio of whole sequences, and with clipped weights), less the mean of the others (rloo), whitened over the batch
    (reinforce_plus_plus, with the group's mean off: _baseline)."""
    disable_grpo_std_normalization: bool = False
    """Do not divide by the standard deviation (Dr. GRPO)."""
    eps_clip: Annotated[float, Field(ge=0.0)] = 0.2
    """How far the ratio may fall below 1."""
    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = None
    """How far the ratio may rise above 1; --eps-clip unless given."""
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Largest ratio that counts against a bad answer (dual clip); off unless given."""
    use_kl_loss: bool = False
    """Keep the weights of --hf-checkpoint as a reference and measure the KL divergence from it."""
    kl_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of that divergence in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Its estimator."""
    calculate_per_token_loss: bool = False
    """Average over all tokens of the batch instead of first over each sample."""
