"""The reference model: the weights that training began from, kept in host memory and swapped in when needed.

In: the inventory of this rank, and how the reference is read into it. Out: a context in which the model has its
weights.
Invariant: afterwards every weight is what it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rlpost.actor import device
from rlpost.weights.inventory import Inventory


class ReferenceWeights:
    """This rank's part of the reference model."""

    def __init__(self, inventory: Inventory, read: Callable[[], None]) -> None:
        """``read`` fills the model with the reference's weights, once; the model's own are put back."""
        self._live = [held.tensor.data for held in inventory.held.values()]
        self._mine, self._reference = ([_on_host_like(tensor) for tensor in self._live] for _ in range(2))
        self._keep(self._mine)
        read()
        self._keep(self._reference)
        self._fill(self._mine)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes as the reference within."""
        self._keep(self._mine)
        self._fill(self._reference)
        try:
            yield
        finally:
            self._fill(self._mine)

    def _keep(self, values: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._live, values, strict=True):
            value.copy_(tensor, non_blocking=True)
        device.synchronise()

    def _fill(self, values: list[torch.Tensor]) -> None:
        """Returns before it is done on a GPU; what follows there comes after it, the next ``_keep`` too."""
        for tensor, value in zip(self._live, values, strict=True):
            tensor.copy_(value, non_blocking=True)


def _on_host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that the device can copy from and to by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
