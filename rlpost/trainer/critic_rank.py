"""A rank of a critic in a separate group of ranks, on the policy's GPUs or on others.

Input: batches of samples and the returns of their tokens. Output: values, optimizer steps, its part
of a checkpoint, an exported folder.

A plain class with one process per rank, like ``rlpost.trainer.actor.Actor``, with those of its
methods that a critic needs. The group has a separate layout and separate process groups. Its part
of a checkpoint has the format of a critic on the policy's ranks, so a run may switch between the
two.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.trainer.critic import Critic
from rlpost.trainer.megatron_checkpoint import Residence
from rlpost.trainer.memory import DeviceMemory
from rlpost.trainer.rank import Rank
from rlpost.trainer.saves import RunningSave


class CriticRank(Rank):
    """One rank of the critic. All methods of ``Actor`` with the same names are collective here."""

    def build(self) -> None:
        """Build model and optimizer of this rank; needs the process groups."""
        critic = self.critic = Critic(
            self.config,
            self.description,
            row_layout=self.made_row_layout(),
            stop_points=self.stop_points,
        )
        self.chunks = critic.chunks
        self.memory = DeviceMemory(
            critic.model, critic.optimizer, communicators=self.communicators()
        )
        self._residence = Residence(self.memory.resident, self.memory.lock)
        self.saves = RunningSave(self.config)

    def import_weights(self) -> None:
        """Load the initial weights; see ``Critic.import_weights``."""
        self._critic().import_weights()

    def save(self, folder: str | Path, step: int, *, in_background: bool = False) -> None:
        """Write model, optimizer and ``step`` into ``folder``/critic; see ``Actor.save``."""
        self.saves.finish_leniently()
        self.saves.add(self._critic().start_save(folder, step, self._residence))
        self.saves.run(in_background=in_background)

    def load(self, folder: str | Path) -> None:
        """Restore what a critic wrote at any layout; see ``Critic.load``.

        It may have been a critic beside a policy.
        """
        self._critic().load(folder)
