"""Operations; Megatron-core names these two in annotations."""

import torch


class FusibleOperation(torch.nn.Module):
    """One."""


class Sequential(torch.nn.Module):
    """Several."""
