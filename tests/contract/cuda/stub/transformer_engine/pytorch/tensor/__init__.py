"""Tensors in FP8."""


class QuantizedTensor:
    """None is ever made."""
