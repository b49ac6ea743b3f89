"""A ledger of memory: who holds which bytes of a GPU or of pinned host memory.

Input: the limit of each place, and what is held and freed. Output: the bytes that are free, or an
``OutOfMemory`` that names every holder. Fakes of ranks and engines enter the bytes of ``rlpost
plan`` at each call, so that the order of a run's memory is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping


class OutOfMemory(AssertionError):
    """A place would hold more than its limit."""


class MemoryLedger:
    """Bytes by place, side and kind; a side is a process, and a kind is held once."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """``limits``: bytes of each place."""
        self._limits = dict(limits)
        self._held: dict[tuple[str, str, str], int] = {}
        self.peaks = dict.fromkeys(limits, 0)
        """Most bytes that were held in each place."""

    def hold(self, place: str, side: str, kind: str, num_bytes: int) -> None:
        """Add bytes; ``kind`` replaces what this side holds of it. Raises OutOfMemory."""
        self._held[place, side, kind] = num_bytes
        total = self.total(place)
        self.peaks[place] = max(self.peaks[place], total)
        if total > self._limits[place]:
            raise OutOfMemory(
                f"{place}: {side} takes {num_bytes / 1e9:.1f} GB of {kind}, which makes "
                f"{total / 1e9:.1f} of {self._limits[place] / 1e9:.1f} GB: {self.holders(place)}"
            )

    def free(self, side: str, *kinds: str) -> None:
        """Remove what a side holds everywhere, of these kinds or of all."""
        for place, holder, kind in [*self._held]:
            if holder == side and (not kinds or kind in kinds):
                del self._held[place, holder, kind]

    def held(self, side: str, kind: str) -> int:
        """Bytes that a side holds of a kind, in all places."""
        return sum(
            size for (_, holder, what), size in self._held.items() if (holder, what) == (side, kind)
        )

    def total(self, place: str) -> int:
        """Bytes that are held in a place."""
        return sum(size for (where, _, _), size in self._held.items() if where == place)

    def available(self, place: str) -> int:
        """Bytes below the limit of a place."""
        return self._limits[place] - self.total(place)

    def holders(self, place: str) -> str:
        """Every holder of a place with its bytes, for messages."""
        return ", ".join(
            f"{side} {kind} {size / 1e9:.1f} GB"
            for (where, side, kind), size in self._held.items()
            if where == place and size
        )
