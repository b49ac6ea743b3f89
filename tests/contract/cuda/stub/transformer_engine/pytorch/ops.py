"""Fusible operations; Megatron-core uses these two names in annotations."""

import torch


class FusibleOperation(torch.nn.Module):
    """One operation."""


class Sequential(torch.nn.Module):
    """A sequence of operations."""
