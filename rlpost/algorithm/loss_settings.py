"""The settings of the loss: the leaves of [grpo] that an actor needs. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Fields have the names and units of [grpo]; ``eps_clip_high`` is resolved."""

    loss_type: str = "policy_loss"
    custom_loss_function_path: str | None = None
    policy_loss: str = "ppo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    calculate_per_token_loss: bool = False
    use_tis: bool = False
    tis_level: str = "token"
    tis_mode: str = "truncate"
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    use_rollout_logprobs: bool = False
    use_rollout_sampling_mask: bool = False
    use_unbiased_kl: bool = False
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    log_probs_chunk_size: int = 1024
    use_opd: bool = False
    opd_type: str | None = None
    opd_form: str = "advantage"
    opd_kl_coef: float = 1.0
    opd_top_k: int | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the reference weights are needed."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def has_teacher(self) -> bool:
        """Whether the trainer holds the weights of a teacher."""
        return self.use_opd and self.opd_type == "megatron"

    @property
    def distils_in_loss(self) -> bool:
        """Whether the loss has a term of the divergence from a teacher."""
        return self.use_opd and self.opd_form == "loss"
