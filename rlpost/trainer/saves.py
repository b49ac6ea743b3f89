"""Saves of one rank: the policy and the critic beside it, optionally in the background.

Input: model, optimizer and critic of the rank. Output: their files in the folder of a checkpoint.
Invariant: at most one save runs; the next one waits for it, because they use the same host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from rlpost.config.tree import Config
from rlpost.errors import CheckpointError
from rlpost.observe.progress.position import RECORDER
from rlpost.observe.spans import span
from rlpost.trainer.critic import Critic
from rlpost.trainer.lora.adapters import checkpoint_settings
from rlpost.trainer.megatron_checkpoint import Progress, Residence, Saver, Writing
from rlpost.trainer.memory import DeviceMemory

logger = logging.getLogger(__name__)


class RunningSave:
    """Waits for the running save of a rank; there is at most one."""

    def __init__(self, config: Config) -> None:
        self._deadline_s = config.checkpoint.save_deadline_s
        # Replaced, never modified in place: another thread may read it while a part is added.
        self._parts: tuple[Writing, ...] = ()

    def add(self, part: Writing) -> None:
        """Add a part to the save; call ``run`` after the last one.

        ``finish`` of the previous save must have returned.
        """
        self._parts = (*self._parts, part)

    def run(self, *, in_background: bool) -> None:
        """Wait for all parts, or let them run.

        Raises:
            CheckpointError: a rank cannot write, and the save is not in the background; raised on
                every rank.
        """
        if not in_background:
            self.finish()
        elif any(part.must_stay for part in self._parts):
            self.wait_copied()

    def wait_copied(self, *, weights_only: bool = False) -> None:
        """Wait until a background save has copied the state (or the weights)."""
        parts = self._parts
        if not parts:
            return
        with span("wait for the checkpoint"), RECORDER.waiting("the checkpoint"):
            for part in parts:
                part.wait_copied(weights_only=weights_only, timeout_s=self._deadline_s)

    def finish(self) -> None:
        """Wait for a background save. Safe to call from another thread.

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
        """
        parts = self._parts
        try:
            for part in parts:
                part.wait()
        finally:
            for part in parts:
                part.join()
            # Only now: the next save uses the same memory, so it must wait here too.
            if self._parts is parts:
                self._parts = ()

    def finish_leniently(self) -> None:
        """As ``finish``, but a failure is only logged: the next save replaces the failed one."""
        try:
            self.finish()
        except CheckpointError as error:
            logger.warning("%s", error)

    def is_done(self) -> bool:
        """Whether no save is running; does not block."""
        if any(part.is_running for part in self._parts):
            return False
        self.finish()
        return True


class Saves(RunningSave):
    """Starts saves of policy and critic, and waits for them."""

    def __init__(
        self,
        config: Config,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
        memory: DeviceMemory,
        critic: Critic | None,
    ) -> None:
        super().__init__(config)
        self._config = config
        self._chunks = chunks
        self._optimizer = optimizer
        self.critic = critic
        """Saved with the policy; None without one."""
        self._memory = memory
        self._saver: Saver | None = None

    @property
    def _residence(self) -> Residence:
        return Residence(self._memory.resident, self._memory.lock)

    def set_buffer(self, num_bytes: int) -> Saver:
        """Replace the host buffer of saves by one of ``num_bytes``. Collective."""
        self._saver = Saver(
            self._chunks,
            None if self._config.checkpoint.no_save_optim else self._optimizer,
            buffer_bytes=num_bytes,
            residence=self._residence,
            adapters=checkpoint_settings(self._config),
        )
        if self.critic is not None:
            self.critic.set_save_buffer(num_bytes, self._residence)
        return self._saver

    def start(self, folder: str | Path, progress: Progress, *, in_background: bool) -> None:
        """Write into ``folder``, which exists. Collective. ``finish`` must have returned.

        Raises:
            CheckpointError: a rank cannot write, and the save is not in the background; raised on
                every rank.
        """
        saver = self._saver or self.set_buffer(self._config.checkpoint.save_buffer_bytes)
        self.add(saver.start(folder, progress))
        if self.critic is not None:
            self.add(self.critic.start_save(folder, progress.step, self._residence))
        self.run(in_background=in_background)
