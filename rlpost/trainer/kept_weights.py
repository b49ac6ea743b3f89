"""A second set of a rank's weights in host memory: the reference, and the old policy.

Input: the inventory of this rank. Output: contexts in which the model has the kept weights, and
their part of a checkpoint. Invariant: after such a context every weight of the model is bitwise
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.errors import CheckpointError
from rlpost.trainer import device, megatron_checkpoint
from rlpost.trainer.memory import PIECE_BYTES
from rlpost.trainer.outcomes import same_on_every_rank
from rlpost.trainer.weights.inventory import Inventory

REFERENCE = "reference"
"""Folder in a checkpoint with the reference."""
ALIGNMENT = 256
"""Bytes at a multiple of which each copy begins, as in torch's allocators."""


class KeptWeights:
    """This rank's shard of another set of weights of the same model. All methods are collective."""

    def __init__(
        self,
        inventory: Inventory,
        saved_in: str,
        *,
        prepare: Callable[[], None],
        shares: KeptWeights | None = None,
    ) -> None:
        """Allocate host memory; the kept weights are undefined until ``take`` or ``load``.

        Args:
            inventory: of this rank.
            saved_in: subfolder of a checkpoint.
            prepare: waits for all that reads or writes the weights in the background.
            shares: another set that is never in the model at the same time; both use one copy of
                the model's own weights.
        """
        self._saved_in, self._prepare = saved_in, prepare
        self._saver: megatron_checkpoint.Saver | None = None
        self._live = [held.tensor.data for held in inventory.held.values()]
        self._kept = host_copies(self._live)
        self._mine: list[torch.Tensor] = host_copies(self._live) if shares is None else shares._mine
        self.is_swapped_in = False
        """Whether the model has the kept weights."""
        self.version: int | None = None
        """Version of the policy with these weights; None: of none, or unknown."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model has the kept weights."""
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out()

    def swap_in(self) -> None:
        """Give the model the kept weights until ``swap_out``; nothing if it has them."""
        if not self.is_swapped_in:
            self._prepare()
            self._keep(self._mine)
            self._fill(self._kept)
            self.is_swapped_in = True

    def swap_out(self) -> None:
        """Give the model its own weights back; nothing if it has them."""
        if self.is_swapped_in:
            self._fill(self._mine)
            self.is_swapped_in = False

    def take(self, version: int | None = None) -> None:
        """Keep the current weights of the model, which are those of ``version`` of the policy."""
        assert not self.is_swapped_in, "the model has the kept weights"
        self._prepare()
        self._keep(self._kept)
        self.version = version

    def save(
        self, folder: str | Path, chunks: Sequence[torch.nn.Module], *, buffer_bytes: int
    ) -> None:
        """Write the kept weights into the folder of a checkpoint.

        Raises:
            CheckpointError: a rank cannot write; raised on every rank.
        """
        with self.swapped_in():
            self._saver = megatron_checkpoint.save_weights(
                Path(folder) / self._saved_in,
                chunks=chunks,
                buffer_bytes=buffer_bytes,
                saver=self._saver,
                version=self.version,
            )

    def load(self, folder: str | Path, chunks: Sequence[torch.nn.Module]) -> bool:
        """Read what ``save`` wrote, also into the model; return False if there is nothing.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        saved = Path(folder) / self._saved_in
        if same_on_every_rank(lambda: find_checkpoint(saved), CheckpointError) is None:
            return False
        self.take(megatron_checkpoint.load_weights(saved, chunks=chunks))
        return True

    def _keep(self, values: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._live, values, strict=True):
            value.copy_(tensor, non_blocking=True)
        device.synchronise()

    def _fill(self, values: list[torch.Tensor]) -> None:
        """Copy ``values`` to the model.

        Asynchronous on a GPU, where stream order protects the host copy.
        """
        for tensor, value in zip(self._live, values, strict=True):
            tensor.copy_(value, non_blocking=True)


class ReferenceWeights(KeptWeights):
    """This rank's shard of the reference model.

    It has the initial weights and, with --ref-update-interval, those of the policy at the end of
    the newest interval. A checkpoint has them once they were updated.
    """

    def __init__(
        self, inventory: Inventory, read: Callable[[], None], *, prepare: Callable[[], None]
    ) -> None:
        """Read the reference weights and restore those of the model.

        ``read`` fills the model with the reference weights. For ``prepare`` see ``KeptWeights``.
        """
        super().__init__(inventory, REFERENCE, prepare=prepare)
        self.was_updated = False
        """Whether a checkpoint needs the weights, because ``read`` no longer gives them."""
        self._keep(self._mine)
        read()
        self._keep(self._kept)
        self._fill(self._mine)

    def take(self, version: int | None = None) -> None:
        """Make the current weights of the model the reference."""
        super().take(version)
        self.was_updated = True


def host_copies(
    tensors: Sequence[torch.Tensor],
    *,
    is_pinned: bool | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> list[torch.Tensor]:
    """Allocate host memory for a copy of each tensor; pinned by default if they are on a GPU.

    Tensors have any shape; their copies have the same shapes and dtypes.

    The copies share pieces of ``piece_bytes``, because torch rounds each pinned allocation up to a
    power of two (ATen/core/CachingHostAllocator.h): one for each tensor takes a third more. The
    setting ``pinned_max_round_threshold_mb`` is no remedy: with it the allocator of torch 2.13
    returns cached blocks that are too small (pytorch/pytorch#192722).
    """
    places: list[tuple[int, int]] = []  # piece, and offset of the copy in it
    used: list[int] = []  # bytes of each piece
    capacities: list[int] = []
    for tensor in tensors:
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        room = (piece for piece in range(len(used)) if used[piece] + size <= capacities[piece])
        if (piece := next(room, None)) is None:
            piece = len(used)
            used.append(0)
            capacities.append(max(piece_bytes, 1 << (size - 1).bit_length()))  # as torch rounds it
        places.append((piece, used[piece]))
        used[piece] += size
    if is_pinned is None:
        is_pinned = any(tensor.is_cuda for tensor in tensors)
    pieces = [
        torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned) for size in used
    ]
    return [
        pieces[piece][begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, (piece, begin) in zip(tensors, places, strict=True)
    ]
