"""Activation recomputation and random number generators."""

from transformer_engine.pytorch.kernels import absent

checkpoint = absent("checkpoint")
activation_recompute_forward = absent("activation_recompute_forward")


class CudaRNGStatesTracker:
    """Megatron-core derives a class from it."""
