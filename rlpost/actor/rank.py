"""What a rank of any role tells about itself: its place, its device and its progress.

Invariant: ``memory_use``, ``position`` and ``write_flight_record`` are safe to call from a second
thread, also while a collective hangs.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.actor import device, parallel, progress
from rlpost.progress.position import Position


class Rank:
    """One rank of a group that trains a model."""

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's TrainBatch."""
        return parallel.data_parallel_rank()

    @property
    def visible_gpu(self) -> str:
        """The GPU of this rank, for an engine that shares it."""
        return device.visible()

    @property
    def has_gpu(self) -> bool:
        """Whether this rank computes on a GPU. Without one its node may still offer GPUs to Ray:
        as many as the settings name.
        """
        return device.total_memory() is not None

    @property
    def gpu_position(self) -> int | None:
        """Index of this rank's GPU on its node; None if unknown or without a GPU."""
        return device.position()

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of this rank's device; None if unknown."""
        return device.peak_flops()

    @property
    def memory_use(self) -> dict[str, float]:
        """Current memory use of this rank, by metric name."""
        return device.memory_use()

    @property
    def position(self) -> Position:
        """Where this rank is."""
        return progress.position()

    def write_flight_record(self, folder: str | Path) -> str | None:
        """Write torch's record of the newest collectives; return its path, None without one."""
        return progress.write_flight_record(folder)
