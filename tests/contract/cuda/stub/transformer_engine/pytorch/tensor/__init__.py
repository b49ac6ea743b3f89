"""Tensors in FP8."""


class QuantizedTensor:
    """Never instantiated."""
