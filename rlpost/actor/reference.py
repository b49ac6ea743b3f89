"""The reference model: weights kept in host memory and swapped in when needed.

They are the initial weights; with --ref-update-interval the policy's from then on.

Input: the inventory of this rank, and a function that reads the reference into the model. Output: a
context in which the model has the reference weights. Invariant: after the context every weight of
the policy is bitwise unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rlpost.actor import device, megatron_checkpoint
from rlpost.actor.torch_dist_folder import find_checkpoint
from rlpost.weights.inventory import Inventory

SAVED = "reference"
"""Folder in a checkpoint with the reference, once it was updated."""


class ReferenceWeights:
    """This rank's shard of the reference model."""

    def __init__(self, inventory: Inventory, read: Callable[[], None]) -> None:
        """Read the reference weights and restore those of the model.

        Args:
            inventory: of this rank.
            read: fills the model with the reference weights; called once.
        """
        self.was_updated = False
        """Whether the weights are no longer those that ``read`` gives."""
        self._saver: megatron_checkpoint.Saver | None = None
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

    def take(self) -> None:
        """Make the current weights of the model the reference."""
        self._keep(self._reference)
        self.was_updated = True

    def save(
        self, folder: str | Path, chunks: Sequence[torch.nn.Module], *, buffer_bytes: int
    ) -> None:
        """Write the weights into the folder of a checkpoint if they were updated. Collective.

        Raises:
            CheckpointError: a rank cannot write; raised on every rank.
        """
        if not self.was_updated:
            return
        with self.swapped_in():
            self._saver = megatron_checkpoint.save_weights(
                Path(folder) / SAVED, chunks=chunks, buffer_bytes=buffer_bytes, saver=self._saver
            )

    def load(self, folder: str | Path, chunks: Sequence[torch.nn.Module]) -> None:
        """Read the weights that ``save`` wrote, if any; the model then has them too. Collective.

        Raises:
            CheckpointError: they do not fit the model.
        """
        if find_checkpoint(Path(folder) / SAVED) is not None:
            megatron_checkpoint.load_weights(Path(folder) / SAVED, chunks=chunks)
            self.take()

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
