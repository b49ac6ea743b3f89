"""The recipe that Megatron-core derives a class from when it is imported."""

import torch


class DelayedScaling:
    """FP8 scales from a history of absolute maxima."""

    def __init__(self, **options: object) -> None:
        self.options = options


class _WeightScales:
    @property
    def power_2_scale(self) -> bool:
        """As in a rank whose environment ``rlpost.trainer.fp8_grid`` has set."""
        return torch.cuda.get_device_capability() >= (10, 0)


class Float8BlockScaling:
    """Scales of blocks."""

    fp8_quant_fwd_weight = _WeightScales()
