"""The modules and subpackages that Megatron-core imports."""

from transformer_engine.pytorch import distributed, ops
from transformer_engine.pytorch.module import (
    DotProductAttention,
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm",
    "distributed", "ops",
]  # fmt: skip
