"""The settings of the loss: what an objective reads. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Fields have the names, units and defaults of the settings; ``Config.loss_settings`` makes it.

    ``policy_loss`` and ``eps_clip_high`` are resolved.
    """

    loss_type: str
    custom_loss_function_path: str | None
    policy_loss: str
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str
    kl_coef: float
    use_unbiased_kl: bool
    entropy_coef: float
    calculate_per_token_loss: bool
    use_tis: bool
    tis_level: str
    tis_mode: str
    tis_clip: float
    tis_clip_low: float
    use_rollout_logprobs: bool
    use_opsm: bool
    opsm_delta: float
    opd_kl_coef: float

    @property
    def loss_name(self) -> str:
        """The setting that chooses the loss, with its value, for messages."""
        if self.loss_type == "custom_loss":
            return f"--custom-loss-function-path {self.custom_loss_function_path}"
        if self.loss_type == "policy_loss":
            return f"--policy-loss {self.policy_loss}"
        return f"--loss-type {self.loss_type}"
