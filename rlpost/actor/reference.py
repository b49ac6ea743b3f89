"""The reference model: the initial weights, kept in host memory and swapped in when needed.

Input: the inventory of this rank, and a function that reads the reference into the model. Output: a
context in which the model has the reference weights. Invariant: after the context every weight of
the policy is bitwise unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rlpost.actor import device
from rlpost.weights.inventory import Inventory


class ReferenceWeights:
    """This rank's shard of the reference model."""

    def __init__(self, inventory: Inventory, read: Callable[[], None]) -> None:
        """Read the reference weights and restore those of the model.

        Args:
            inventory: of this rank.
            read: fills the model with the reference weights; called once.
        """
        self._live = [held.tensor.data for held in inventory.held.values()]
        self._mine, self._reference = (
            [_on_host_like(tensor) for tensor in self._live] for _ in range(2)
        )
        self._keep(self._mine)
        read()
        self._keep(self._reference)
        self._fill(self._mine)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model has the reference weights."""
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
        """Copy ``values`` to the model; asynchronous on a GPU, where stream order protects the host
        copy.
        """
        for tensor, value in zip(self._live, values, strict=True):
            tensor.copy_(value, non_blocking=True)


def _on_host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a copy; pinned if the tensor is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
