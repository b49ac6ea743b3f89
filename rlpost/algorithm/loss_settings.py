"""The settings of the loss: what an objective reads, and what each policy loss uses of them.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss: all that the settings and their checks know about it.

    Attributes:
        about: what it clips, for the help of --policy-loss.
        eps_clip: default of --eps-clip.
        eps_clip_high: default of --eps-clip-high where --eps-clip is not given.
        has_dual_clip: --eps-clip-c has an effect.
    """

    about: str
    eps_clip: float
    eps_clip_high: float
    has_dual_clip: bool = True


POLICY_LOSS_ROWS = {
    # arXiv 1707.06347, section 6.1
    "ppo": PolicyLoss("clips the ratio of each token", eps_clip=0.2, eps_clip_high=0.2),
    # arXiv 2507.18071, section 5.1
    "gspo": PolicyLoss("clips the ratio of the sequence", eps_clip=3e-4, eps_clip_high=4e-4),
    # Ratios from 0 to 5, as arXiv 2510.13786, which found 4, 5 and 8 equal. arXiv 2506.13585 has no
    # lower bound and publishes no upper one.
    "cispo": PolicyLoss(
        "weights each token by a clipped ratio without gradient",
        eps_clip=1.0,
        eps_clip_high=4.0,
        has_dual_clip=False,
    ),
}
"""By the value of --policy-loss. The loss itself is in ``objective.POLICY_LOSSES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Fields have the names, units and defaults of the settings; ``Config.loss_settings`` makes it.

    ``policy_loss``, ``eps_clip`` and ``eps_clip_high`` are resolved.
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
