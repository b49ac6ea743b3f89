"""The hash of weights, from the tensors themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """One digest a tensor, of its name, dtype, shape and bytes; the hash is that of all digests."""
    digests = []
    for name, tensor in sorted(tensors.items()):
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digests.append(hashlib.sha256(head + content).hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()
