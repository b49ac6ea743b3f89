"""The FP8 tensor with one scale."""

from transformer_engine.pytorch.tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """Never instantiated."""
