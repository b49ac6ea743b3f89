"""The critic on separate GPUs: one rank of its group (--critic-own-gpus).

Input: batches of samples and the returns of their tokens. Output: values, optimizer steps, its part
of a checkpoint, an exported folder.

A plain class with one process per rank, as ``rlpost.actor.actor.Actor``, and with the same methods
as far as a critic has them. The group has its own layout and process groups. Its part of a
checkpoint has the format of a critic on the policy's ranks, so a run may change between both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlpost.actor import device, parallel, weight_files
from rlpost.actor.critic import Critic, Values
from rlpost.actor.joint_writing import JointWriting
from rlpost.actor.megatron_checkpoint import Residence
from rlpost.actor.memory import DeviceMemory
from rlpost.actor.model_description import ModelDescription, read_description
from rlpost.actor.own_time import OWN_TIME
from rlpost.actor.packing import RowLayout
from rlpost.actor.parallel import Rendezvous
from rlpost.actor.rank import Rank
from rlpost.actor.settings import ActorSettings
from rlpost.actor.stop_points import StopPoints
from rlpost.columns import FloatColumn
from rlpost.errors import CheckpointError
from rlpost.metrics.spans import span
from rlpost.types import StepResult, TrainBatch

logger = logging.getLogger(__name__)


class CriticRank(Rank):
    """One rank of the critic. All methods of ``Actor`` with the same names are collective here."""

    def __init__(
        self, settings: ActorSettings, description: ModelDescription | None = None
    ) -> None:
        """Read the architecture.

        Args:
            settings: of this rank, at the critic's layout.
            description: of the model; read from ``hf_checkpoint`` unless given.

        Raises:
            WeightError: the architecture is not supported.
            ConfigError: the architecture cannot be sharded this way.
        """
        self.settings = settings
        self.stop_points = StopPoints()
        self._writing: JointWriting | None = None
        self.description = description or read_description(
            settings.hf_checkpoint, settings.model_args
        )
        self.description.check_layout(settings)

    def setup(self, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        """Join the process groups, then build model and optimizer.

        The weights are not set: call ``import_weights`` or ``load`` next.

        Raises:
            PlacementError: the layout does not fit the number of ranks.
        """
        settings = self.settings
        device.prepare(settings)
        parallel.initialise(
            Rendezvous(rank, world_size, master_addr, master_port),
            settings,
            num_virtual_stages=self.description.num_virtual_stages(settings),
        )
        row_layout = RowLayout(
            row_multiple=settings.row_multiple,
            sequence_multiple=settings.sequence_multiple,
            context_rank=parallel.context_parallel_group().rank(),
            context_size=settings.context_parallel_size,
        )
        self.critic = Critic(
            settings, self.description, row_layout=row_layout, stop_points=self.stop_points
        )
        memory = DeviceMemory(self.critic.model, self.critic.optimizer)
        self._residence = Residence(memory.resident, memory.lock)

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
        if (writing := self._writing) is not None:  # another thread may set it to None
            with span("wait for the checkpoint"):
                writing.wait_copied(timeout_s=self.settings.save_deadline_s)
        return StepResult(self.critic.train_step(batch, values, returns), own_s=OWN_TIME.seconds())

    def save(self, folder: str | Path, step: int, *, in_background: bool = False) -> None:
        """Write model, optimizer and ``step`` into ``folder``/critic; see ``Actor.save``.

        Raises:
            CheckpointError: a rank cannot write; raised on every rank.
        """
        try:
            self._finish_save()
        except CheckpointError as error:
            logger.warning("%s", error)  # this save replaces the failed one
        self._writing = writing = JointWriting()
        self.critic.start_save(writing, folder, step, self._residence)
        if not in_background:
            self._finish_save()
        elif writing.must_stay:
            writing.wait_copied(timeout_s=self.settings.save_deadline_s)

    def save_is_done(self) -> bool:
        """Whether no save is running; does not block.

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
        """
        if (writing := self._writing) is not None and writing.is_running:
            return False
        self._finish_save()
        return True

    def _finish_save(self) -> None:
        writing = self._writing
        if writing is None:
            return
        try:
            writing.wait()
        finally:
            if self._writing is writing:
                self._writing = None

    def load(self, folder: str | Path) -> None:
        """Restore what a critic wrote at any layout, on its own ranks or on those of a policy.

        Raises:
            CheckpointError: the checkpoint has no critic, or one that does not fit the model.
        """
        self.critic.load(folder)

    def export_critic(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder; see ``Critic.export``.

        Raises:
            CheckpointError: the folder cannot be written; raised on every rank.
        """
        weight_files.written_everywhere(partial(self.critic.export, folder), folder)

    def close(self) -> None:
        """Leave all process groups."""
        parallel.destroy()
