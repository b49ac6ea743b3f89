"""A rank of a critic in a separate group of ranks, on the policy's GPUs or on others.

Input: batches of samples and the returns of their tokens. Output: values, optimizer steps, its part
of a checkpoint, an exported folder.

A plain class with one process per rank, like ``rlpost.actor.actor.Actor``, with those of its methods
that a critic needs. The group has a separate layout and separate process groups. Its part of a
checkpoint has the format of a critic on the policy's ranks, so a run may switch between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlpost.actor import weight_files
from rlpost.actor.critic import Critic, Values
from rlpost.actor.megatron_checkpoint import Residence
from rlpost.actor.memory import DeviceMemory
from rlpost.actor.own_time import OWN_TIME
from rlpost.actor.rank import Rank
from rlpost.actor.saves import RunningSave
from rlpost.columns import FloatColumn
from rlpost.types import StepResult, TrainBatch


class CriticRank(Rank):
    """One rank of the critic. All methods of ``Actor`` with the same names are collective here."""

    def build(self) -> None:
        """Build model and optimizer of this rank; needs the process groups."""
        self.critic = Critic(
            self.settings,
            self.description,
            row_layout=self.made_row_layout(),
            stop_points=self.stop_points,
        )
        self.memory = DeviceMemory(self.critic.model, self.critic.optimizer)
        self._residence = Residence(self.memory.resident, self.memory.lock)
        self._save = RunningSave(self.settings)

    @property
    def num_parameters(self) -> int:
        """Parameters of the critic on this rank."""
        chunks = self.critic.chunks
        return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())

    def import_weights(self) -> None:
        """Load the initial weights; see ``Critic.import_weights``."""
        self.critic.import_weights()

    @property
    def num_critic_steps(self) -> int:
        """Optimizer steps so far."""
        return self.critic.num_optimizer_steps

    def compute_values(self, batch: TrainBatch) -> Values:
        """Return the value before each response token; see ``Critic.values``."""
        return self.critic.values(batch)

    def train_critic(
        self, batch: TrainBatch, values: Values | None, returns: Sequence[FloatColumn]
    ) -> StepResult:
        """Run one optimizer step; see ``Critic.train_step``."""
        self._save.wait_copied()
        return StepResult(self.critic.train_step(batch, values, returns), own_s=OWN_TIME.seconds())

    def save(self, folder: str | Path, step: int, *, in_background: bool = False) -> None:
        """Write model, optimizer and ``step`` into ``folder``/critic; see ``Actor.save``."""
        self._save.finish_leniently()
        self._save.add(self.critic.start_save(folder, step, self._residence))
        self._save.run(in_background=in_background)

    def save_is_done(self) -> bool:
        """Whether no save is running; see ``Actor.save_is_done``."""
        return self._save.is_done()

    def load(self, folder: str | Path) -> None:
        """Restore what a critic wrote at any layout, beside a policy or not; see ``Critic.load``."""
        self.critic.load(folder)

    def export_critic(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder; see ``Actor.export_critic``."""
        weight_files.written_everywhere(partial(self.critic.export, folder), folder)
