"""The table [grpo] of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.algorithm.loss_settings import POLICY_LOSS_ROWS
from rlpost.config.groups.base import FunctionPath, Group, Positive

if TYPE_CHECKING:
    EstimatorName = str
    PolicyLossName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
    PolicyLossName = Literal[tuple(POLICY_LOSS_ROWS)]


def _by_loss(key: str) -> str:
    """The defaults of a setting of the policy losses.

    >>> _by_loss("eps_clip")
    '0.2 (ppo), 0.0003 (gspo), 1 (cispo)'
    """
    return ", ".join(f"{getattr(it, key):g} ({name})" for name, it in POLICY_LOSS_ROWS.items())


class GrpoConfig(Group):
    """Advantage estimator, loss, KL penalties and importance sampling."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """Objective: the policy loss; the negative log-likelihood of the responses in --prompt-data
    (SFT, nothing is generated); or the loss of --custom-loss-function-path."""
    custom_loss_function_path: FunctionPath | None = None
    """module.function or FILE.py:function: the loss of --loss-type custom_loss (signature in
    docs/actor.md)."""
    custom_advantage_function_path: FunctionPath | None = None
    """module.function or FILE.py:function: advantages in place of --advantage-estimator
    (docs/actor.md).
    """
    custom_reward_post_process_path: FunctionPath | None = None
    """module.function or FILE.py:function of slime, (args, samples) -> (raw_rewards, rewards): the
    rewards to train on, in place of the group's normalisation (docs/rewards.md)."""
    advantage_estimator: EstimatorName = Field(
        default="grpo",
        description="; ".join(f"{name} {it.about}" for name, it in ESTIMATORS.items()),
    )
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount per trained token between an action and a reward, with --advantage-estimator ppo or
    reinforce_plus_plus."""
    lambd: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Lambda of GAE, with --advantage-estimator ppo: 1 sums all later rewards, 0 looks one token
    ahead."""
    policy_loss: PolicyLossName | None = Field(
        default=None,
        description="Loss of --loss-type policy_loss: "
        + "; ".join(f"{name} {it.about}" for name, it in POLICY_LOSS_ROWS.items())
        + ". Default: the one that --advantage-estimator names, else ppo.",
    )
    disable_grpo_std_normalization: bool = False
    """Do not divide advantages by the group's standard deviation: the advantages of Dr. GRPO, whose
    loss is a sum over tokens (docs/actor.md)."""
    disable_rewards_normalization: bool = False
    """Take rewards as advantages, without a baseline (REINFORCE)."""
    disable_compute_advantages_and_returns: bool = False
    """Compute no advantages: with --loss-type sft_loss, or a custom loss that uses none and gets
    zeros."""
    normalize_advantages: bool = False
    """Shift and scale the advantages of a rollout to mean 0 and variance 1 over all its tokens."""
    overlong_buffer_len: Positive | None = None
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13): subtract up to
    --overlong-penalty from the reward, linearly over this many tokens before the length at which
    generation ends: --rollout-max-response-len, or less where --rollout-max-context-len ends it
    earlier. Off by default."""
    overlong_penalty: Annotated[float, Field(ge=0.0)] = 1.0
    """The most that it subtracts."""
    truncated_answers: Literal["train", "mask", "punish"] = "train"
    """Responses cut off at a length limit: train them as graded, mask all of their samples out of the
    loss (the baseline of the group counts them), or give them the reward --punished-reward."""
    repetitive_answers: Literal["train", "mask", "punish"] = "train"
    """The same for responses that end in a loop of repetitions (rollout/repetitive_frac)."""
    punished_reward: float = 0.0
    """Reward of punished responses."""
    eps_clip: Annotated[float, Field(ge=0.0)] | None = Field(
        default=None,
        description="Lower clip range: the ratio is clipped at 1 - eps_clip. Default: "
        f"{_by_loss('eps_clip')}.",
    )
    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = Field(
        default=None,
        description="Upper clip range: the ratio is clipped at 1 + eps_clip_high. Default: "
        f"--eps-clip if that is given, else {_by_loss('eps_clip_high')}.",
    )
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual-clip bound of the ratio for negative advantages, with ppo and gspo. Off by default."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the per-token KL penalty against the reference in the reward; not with
    --kl-loss-coef."""
    use_kl_loss: bool = False
    """Load the weights of --ref-load, or else --hf-checkpoint, as the reference model and compute
    the KL divergence from it."""
    kl_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of that KL divergence in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator, in the loss and in the reward. In the loss, k2 has the gradient of the
    divergence; k1 has none without --use-unbiased-kl."""
    ref_update_interval: Positive | None = None
    """Make the policy the reference each time this many rollouts were trained; checkpoints then hold the
    reference as well. Default: the reference stays as loaded."""
    use_unbiased_kl: bool = False
    """Weight that KL divergence by the ratio of the policy to the old policy, which removes the
    bias of off-policy tokens (DeepSeek-V3.2, 2025, equation 7)."""
    entropy_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the entropy bonus, which is subtracted from the loss."""
    use_tis: bool = False
    """Weight the loss by the ratio of trainer to engine probabilities (truncated importance
    sampling)."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio per token, per response, or its geometric mean over the response."""
    tis_mode: Literal["truncate", "mask", "reject"] = "truncate"
    """Weight outside the bounds: clamp to the bound (truncate) or zero (mask, IcePop). reject is
    mask with weight 1 inside the bounds."""
    tis_clip: Annotated[float, Field(gt=0.0)] = 2.0
    """Upper bound of the ratio."""
    tis_clip_low: Annotated[float, Field(ge=0.0)] = 0.0
    """Lower bound of the ratio."""
    use_rollout_logprobs: bool = False
    """Compare the policy with the log-probs that the engines reported, instead of those of the
    trainer before its first optimizer step, which are then not computed; not with --use-tis."""
    keep_old_actor: bool = False
    """Compare the policy with the weights that generated, kept in host memory, instead of with
    itself before the rollout's first optimizer step: those of the update before the last one, or,
    with --update-weights-interval above 1, of the last one (docs/rollout.md)."""
    use_rollout_sampling_mask: bool = False
    """Compute log-probs of policy and reference, and entropies, over the tokens that
    --rollout-top-p and --rollout-top-k left to sample from at each position, which the engines
    return (DeepSeek-V3.2, 2025, section 3.1). Needs --rollout-top-k of at most 4096."""
    use_opsm: bool = False
    """Off-policy sequence masking (DeepSeek-V3.2, 2025, section 3.1): leave responses with a
    negative advantage out of the policy loss when the policy has moved away from them."""
    opsm_delta: Annotated[float, Field(ge=0.0)] = 1e-4
    """Mean log-ratio of old policy to policy over a response, in nats, beyond which --use-opsm
    masks it."""
    use_rollout_routing_replay: bool = False
    """Mixture of experts: the trainer sends each token to the experts that the engine chose for it
    (R3, docs/actor.md). The engines return their choice."""
    use_routing_replay: bool = False
    """Mixture of experts: the experts that the trainer chooses in its first forward pass on a
    sample are those of every later pass on it. With --use-rollout-routing-replay, of the tokens for
    which the engine returned none.
    """
    calculate_per_token_loss: bool = False
    """Average the loss over all tokens of the batch instead of first over each sample."""
    enable_mtp_training: bool = False
    """Train the layer for multi-token prediction (MTP) beside the policy, with a cross-entropy loss
    on the token after next. Its gradients reach no weight of the policy (docs/actor.md)."""
    mtp_loss_scaling_factor: Annotated[float, Field(gt=0.0)] = 0.1
    """Factor of that loss."""
    log_probs_chunk_size: Positive = 1024
    """Tokens per chunk when log-probs are computed; bounds the float32 memory of a pass over the
    vocabulary."""
    guard_initial_kl: Annotated[float, Field(ge=0.0)] = 1e-3
    """Maximum KL divergence before any update: from the old policy, and in the first step of a run
    from the reference. A larger value is an error; 0 disables the check."""
    guard_rollout_logprob_diff: Annotated[float, Field(ge=0.0)] = 0.1
    """Warn when the mean absolute difference between engine and trainer log-probs exceeds this. 0
    disables the check."""
    guard_grad_norm_factor: Annotated[float, Field(ge=0.0)] = 10.0
    """Warn when the gradient norm exceeds this many times the median of the preceding steps. 0
    disables the check."""

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the reference weights are needed."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def is_supervised(self) -> bool:
        """Whether given responses are trained (SFT) in place of generated ones."""
        return self.loss_type == "sft_loss"
