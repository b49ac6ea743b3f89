"""A bounded host buffer between live tensors and the files of a checkpoint.

Input: chunks of live tensors, in order. Output: their bytes in host memory, in batches for the
threads that write them. One thread copies while slots are free, so the buffer is the only memory
besides the tensors. Training continues; before it changes the tensors it calls ``wait_copied``.

Invariant: a batch that a writer has taken does not change until the writer releases it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from rlpost.errors import CheckpointError
from rlpost.trainer import device
from rlpost.trainer.torch_dist.shards import Chunk

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes; a tensor of any dtype may begin there
LARGEST_SLOT = 256 * 1024**2
NUM_SLOTS = 4  # minimum: one being filled, two being written, one waiting
NOTED_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks that share one slot, by their indices in the list of chunks."""

    indices: tuple[int, ...]
    is_last_of_weights: bool


class HostBuffer:
    """Slots of host memory, pinned with CUDA.

    They are allocated on first use and kept, because allocating and pinning gigabytes takes longer
    than copying them.
    """

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes`` bounds all slots together."""
        self.slot_bytes = max(
            ALIGNMENT, min(LARGEST_SLOT, num_bytes // NUM_SLOTS) // ALIGNMENT * ALIGNMENT
        )
        self.num_slots = max(NUM_SLOTS, num_bytes // self.slot_bytes)
        self._free: deque[torch.Tensor] = deque()
        self._num_made = 0

    def take(self) -> torch.Tensor | None:
        """A free slot: [slot_bytes], uint8; None when all are in use."""
        if self._free:
            return self._free.popleft()
        if self._num_made == self.num_slots:
            return None
        self._num_made += 1
        return torch.empty(self.slot_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def give_back(self, slot: torch.Tensor) -> None:
        """Return a slot [slot_bytes] to the buffer."""
        self._free.append(slot)


def batches_of(chunks: Sequence[Chunk], *, num_weights: int, slot_bytes: int) -> list[Batch]:
    """Group consecutive chunks that fit into one slot. Pure.

    The first ``num_weights`` chunks are weights; a batch contains either weights or optimizer
    states.
    """
    batches: list[list[int]] = []
    remaining = 0
    for index, chunk in enumerate(chunks):
        size = _aligned(chunk.num_bytes)
        if not batches or size > remaining or index == num_weights:
            batches.append([])
            remaining = slot_bytes
        batches[-1].append(index)
        remaining -= size
    return [Batch(tuple(each), is_last_of_weights=each[-1] == num_weights - 1) for each in batches]


@dataclass(slots=True)
class Filled:
    """A batch in host memory."""

    batch: Batch
    tensors: list[torch.Tensor]
    """One flat tensor per chunk, over exactly its bytes of the slot."""
    slot: torch.Tensor = field(repr=False)


class HostStream:
    """Streams the chunks of one save through the buffer.

    Call ``start``; writer threads call ``take`` and ``release``.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        num_weights: int,
        buffer: HostBuffer,
        residence: Callable[[torch.Tensor], torch.Tensor],
        lock: AbstractContextManager[object],
    ) -> None:
        """Plan the batches.

        The first ``num_weights`` of this rank's chunks are weights. ``residence`` returns the
        tensor with the values of one that may be offloaded. ``lock`` is held while tensors are
        read, so that they are not offloaded during a copy.
        """
        self._chunks = chunks
        self._buffer = buffer
        self._residence = residence
        self._lock = lock
        self._pending = deque(
            batches_of(chunks, num_weights=num_weights, slot_bytes=buffer.slot_bytes)
        )
        self._filled: deque[Filled] = deque()
        self._changed = threading.Condition()
        self._weights_copied = num_weights == 0
        self._is_copied = not self._pending
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-copy", daemon=True)

    def start(self) -> None:
        """Start copying, after all work that is queued on the device."""
        device.synchronise()
        self._thread.start()

    def take(self) -> Filled | None:
        """The next batch in host memory; None after the last.

        Raises:
            CheckpointError: copying failed or was cancelled.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._filled or self._is_copied or self._problem is not None
            )
            if self._problem is not None:
                raise CheckpointError(f"cannot copy the state: {self._problem}") from self._problem
            return self._filled.popleft() if self._filled else None

    def release(self, filled: Filled) -> None:
        """Free the slot of a written batch."""
        with self._changed:
            self._buffer.give_back(filled.slot)
            self._changed.notify_all()

    def cancel(self, problem: BaseException) -> None:
        """Stop copying and release all waiting threads.

        A stream that has copied everything is unaffected.
        """
        with self._changed:
            if not self._is_copied and self._problem is None:
                self._problem = problem
            self._changed.notify_all()

    def close(self) -> None:
        """Return unwritten slots to the buffer; call it when no writer is left."""
        self.cancel(CheckpointError("the save ended early"))
        self._thread.join()
        with self._changed:
            while self._filled:
                self._buffer.give_back(self._filled.popleft().slot)

    def wait_copied(self, *, weights_only: bool = False, timeout_s: float) -> None:
        """Wait until the tensors (or only the weights) may be changed.

        After ``timeout_s`` the save is cancelled, so that training continues.
        """
        started = time.monotonic()

        def is_done() -> bool:
            return (
                self._is_copied
                or self._problem is not None
                or (weights_only and self._weights_copied)
            )

        with self._changed:
            if not self._changed.wait_for(is_done, timeout_s):
                self.cancel(
                    CheckpointError(
                        f"the storage did not accept the state within --save-deadline-s {timeout_s:.0f}; "
                        "increase --save-buffer-gb or use faster storage"
                    )
                )
        waited = time.monotonic() - started
        if waited > NOTED_WAIT_S:
            logger.warning(
                "training waited %.1f s for a checkpoint copy; increase --save-buffer-gb", waited
            )

    def _run(self) -> None:
        try:
            with device.side_stream():
                while self._pending and self._copy_next(self._pending.popleft()):
                    pass
        except BaseException as error:
            self.cancel(error)

    def _copy_next(self, batch: Batch) -> bool:
        """Copy a batch as soon as a slot is free; returns False when the stream was cancelled."""
        with self._changed:
            slot = None
            while slot is None:
                if self._problem is not None:
                    return False
                slot = self._buffer.take()
                if slot is None:
                    self._changed.wait()
        try:
            filled = Filled(batch, self._copied(batch, slot), slot)
        except BaseException:
            self.release(Filled(batch, [], slot))
            raise
        with self._changed:
            self._filled.append(filled)
            self._weights_copied = self._weights_copied or batch.is_last_of_weights
            self._is_copied = not self._pending
            self._changed.notify_all()
        return True

    def _copied(self, batch: Batch, slot: torch.Tensor) -> list[torch.Tensor]:
        tensors, begin = [], 0
        with self._lock:
            for index in batch.indices:
                chunk = self._chunks[index]
                # Not a view: torch.save would write the whole storage of it.
                held = torch.frombuffer(
                    slot.numpy(), dtype=chunk.shard.dtype, count=chunk.numel, offset=begin
                )
                held.copy_(chunk.within(self._residence(chunk.shard.live())), non_blocking=True)
                tensors.append(held)
                begin += _aligned(chunk.num_bytes)
            device.synchronise_stream()
        return tensors


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
