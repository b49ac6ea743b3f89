"""The table [grpo] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import FunctionPath, Group, Positive


class GrpoConfig(Group):
    """The algorithm."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """What is minimised: a policy loss; the negative log-likelihood of the responses in --prompt-data (then nothing is
    generated); or that of --custom-loss-function-path."""
    custom_loss_function_path: FunctionPath | None = None
    """module.function or FILE.py:function: the loss of --loss-type custom_loss (docs/actor.md has its signature)."""
    custom_advantage_function_path: FunctionPath | None = None
    """module.function or FILE.py:function: advantages in place of --advantage-estimator (docs/actor.md)."""
    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    """Advantages: rewards less their group's mean, over its standard deviation (grpo), less the mean of the others
    (rloo), whitened over the batch (reinforce_plus_plus, with the group's mean off: _baseline). gspo and cispo, as
    published recipes have it, mean grpo with the --policy-loss of that name."""
    policy_loss: Literal["ppo", "gspo", "cispo"] | None = None
    """Which ratio --loss-type policy_loss clips, and how: that of each token (ppo), that of the whole sequence (gspo),
    or a weight without gradient (cispo). Unless given: the one that --advantage-estimator names, else ppo."""
    disable_grpo_std_normalization: bool = False
    """Do not divide by the standard deviation (Dr. GRPO)."""
    eps_clip: Annotated[float, Field(ge=0.0)] = 0.2
    """How far the ratio may fall below 1."""
    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = None
    """How far the ratio may rise above 1; --eps-clip unless given."""
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Largest ratio that counts against a bad answer (dual clip); off unless given."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL divergence from the reference in the reward, token by token; not with --kl-loss-coef."""
    use_kl_loss: bool = False
    """Keep the weights of --ref-load, or else of --hf-checkpoint, as a reference and measure the KL divergence from
    it."""
    kl_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of that divergence in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Its estimator, in the loss and in the reward."""
    entropy_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the entropy of the policy, which is taken off the loss."""
    use_tis: bool = False
    """Weigh the loss by the ratio of trainer's to engines' probabilities (truncated importance sampling)."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of each token, of the whole answer, or its geometric mean over the answer."""
    tis_mode: Literal["truncate", "mask", "reject"] = "truncate"
    """Outside the bounds: the bound (truncate) or nothing (mask, IcePop); reject is mask with weight 1 inside."""
    tis_clip: Annotated[float, Field(gt=0.0)] = 2.0
    """Upper bound of the ratio."""
    tis_clip_low: Annotated[float, Field(ge=0.0)] = 0.0
    """Lower bound of the ratio."""
    calculate_per_token_loss: bool = False
    """Average over all tokens of the batch instead of first over each sample."""
    loss_unit: Literal["sample", "answer"] = "sample"
    """Where --custom-generate-function-path returns k samples for one answer: each counts as one in the baseline and in
    the loss, so the answer weighs k (sample); or all together weigh 1, with the mean of their rewards (answer, as
    slime)."""
    log_probs_chunk_size: Positive = 1024
    """Tokens whose log-probs are computed at once: bounds the memory of a pass over the vocabulary in float32."""
    guard_initial_kl: Annotated[float, Field(ge=0.0)] = 1e-3
    """Largest KL divergence from the old and, in a run's first step, from the reference policy before any update;
    more is an error. 0 is off."""
    guard_rollout_logprob_diff: Annotated[float, Field(ge=0.0)] = 0.1
    """Mean absolute difference between the engines' and the trainer's log-probs above which there is a warning. 0 is
    off."""
    guard_grad_norm_factor: Annotated[float, Field(ge=0.0)] = 10.0
    """Warn of a gradient norm so many times the median of the steps before. 0 is off."""
