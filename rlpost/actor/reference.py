"""The reference model: the weights that training began from, kept in host memory and swapped in when needed.

In: the inventory of this rank, and how the reference is read into it. Out: a context in which the model has its
weights.
Invariant: afterwards every weight is what it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rlpost.weights.inventory import Inventory


class ReferenceWeights:
    """This rank's part of the reference model."""

    def __init__(self, inventory: Inventory, read: Callable[[], None]) -> None:
        """``read`` fills the model with the reference's weights, once; the model's own are put back."""
        self._live = [held.tensor.data for held in inventory.held.values()]
        mine = self._on_host()
        read()
        self._reference = self._on_host()
        self._fill(mine)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes as the reference within."""
        mine = self._on_host()
        self._fill(self._reference)
        try:
            yield
        finally:
            self._fill(mine)

    def _on_host(self) -> list[torch.Tensor]:
        return [tensor.to("cpu", copy=True) for tensor in self._live]

    def _fill(self, values: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._live, values, strict=True):
            tensor.copy_(value)
