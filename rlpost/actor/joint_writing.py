"""Several saves of one rank that are waited for as one: those of the policy and of the critic.

Input: saves that background threads complete. Output: the interface of a single save.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.actor.megatron_checkpoint import Progress, Saver, Writing


class JointWriting:
    """The same interface as ``Writing``."""

    def __init__(self) -> None:
        """Without parts; each ``add`` starts one."""
        self._parts: list[Writing] = []
        self.must_stay = False
        """Whether an optimizer must not be offloaded while its save copies it."""

    def add(
        self,
        saver: Saver,
        folder: str | Path,
        progress: Progress,
        *,
        with_random_state: bool = True,
    ) -> None:
        """Start a part; see ``Saver.start``."""
        self._parts.append(saver.start(folder, progress, with_random_state=with_random_state))
        self.must_stay = self.must_stay or saver.must_stay

    @property
    def is_running(self) -> bool:
        """Whether ``wait`` would block."""
        return any(part.is_running for part in self._parts)

    def wait_copied(self, *, weights_only: bool = False, timeout_s: float) -> None:
        """Wait until tensors (or only weights) of all parts may change."""
        for part in self._parts:
            part.wait_copied(weights_only=weights_only, timeout_s=timeout_s)

    def wait(self) -> None:
        """Wait until every file of every part is on disk.

        Raises:
            CheckpointError: a rank could not write a part; raised on every rank, when no part is
                being written.
        """
        try:
            for part in self._parts:
                part.wait()
        finally:
            for part in self._parts:
                part.join()
