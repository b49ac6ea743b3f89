"""The base of a rank: settings, process groups, device, progress, and the critic of PPO.

Invariant: ``memory_use``, ``position`` and ``write_flight_record`` are safe to call from a second
thread, also while a collective hangs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from common.attempt import attempt_secret
from rlpost.columns import FloatColumn
from rlpost.config.tree import Config
from rlpost.observe.progress.position import RECORDER, Position
from rlpost.trainer import device, parallel, progress
from rlpost.trainer.critic import Critic, Values
from rlpost.trainer.model_description import ModelDescription, read_description
from rlpost.trainer.own_time import OWN_TIME
from rlpost.trainer.packing import RowLayout
from rlpost.trainer.parallel import Communicators, Rendezvous
from rlpost.trainer.saves import RunningSave
from rlpost.trainer.stop_points import StopPoints
from rlpost.types import StepResult, TrainBatch

logger = logging.getLogger(__name__)


class Rank(ABC):
    """One rank of a group that trains a model."""

    chunks: list[GPTModel]
    """The model of this rank, one chunk per virtual pipeline stage; set by ``build``."""
    critic: Critic | None = None
    """Set by ``build``; None without ``--advantage-estimator ppo``."""
    stop_points: StopPoints
    saves: RunningSave
    """Set by ``build``."""

    def __init__(self, config: Config, description: ModelDescription | None = None) -> None:
        """Read the architecture: ``description`` is read from ``hf_checkpoint`` unless given.

        Raises:
            WeightError: the architecture is not supported.
            ConfigError: the architecture cannot be sharded this way.
        """
        self.config = config
        self.stop_points = StopPoints()
        self.description = description or read_description(
            config.checkpoint.hf_checkpoint, config.checkpoint
        )
        self.description.check_layout(config)

    def setup(self, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        """Join the process groups, then build model and optimizer.

        The weights are not set: call ``import_weights`` or ``load`` next.

        Raises:
            PlacementError: the layout does not fit the number of ranks.
        """
        device.prepare(self.config)
        parallel.initialise(
            Rendezvous(rank, world_size, master_addr, master_port, attempt_secret()),
            self.config,
            num_virtual_stages=self.description.num_virtual_stages(self.config),
        )
        self.build()
        num_parameters = sum(one.numel() for chunk in self.chunks for one in chunk.parameters())
        logger.info(
            "rank %d of %d: %d parameters on %s",
            rank,
            world_size,
            num_parameters,
            device.current(),
        )

    @abstractmethod
    def build(self) -> None:
        """Build model and optimizer of this rank; needs the process groups."""

    def made_row_layout(self) -> RowLayout:
        """Return the layout of packed rows; needs the process groups."""
        return RowLayout(
            row_multiple=self.config.row_multiple,
            sequence_multiple=self.config.perf.sequence_multiple,
            context_rank=parallel.context_parallel_group().rank(),
            context_size=self.config.perf.context_parallel_size,
            share_prefix=bool(self.config.perf.share_prefix),
            takes_images=self.config.takes_images,
        )

    def communicators(self) -> Communicators | None:
        """Return this rank's communicators if their buffers are offloaded, else None."""
        is_offloaded = self.config.cluster.offload_nccl and device.backend() == "nccl"
        return Communicators() if is_offloaded else None

    def compute_values(self, batch: TrainBatch) -> Values:
        """The critic's value before each response token; see ``Critic.values``."""
        return self._critic().values(batch)

    def train_critic(
        self, batch: TrainBatch, values: Values | None, returns: Sequence[FloatColumn]
    ) -> StepResult:
        """Run one optimizer step of the critic; see ``Critic.train_step``."""
        self.wait_copied()
        metrics = self._critic().train_step(batch, values, returns)
        return StepResult(metrics, own_s=OWN_TIME.seconds())

    def export_critic(self, folder: str | Path) -> None:
        """Write the critic as a Hugging Face folder with a model for token classification.

        Raises:
            CheckpointError: the folder cannot be written; raised on every rank.
        """
        self._critic().export(folder)

    def _critic(self) -> Critic:
        """Return the critic, which the settings must have."""
        assert self.critic is not None, "a critic needs --advantage-estimator ppo"
        return self.critic

    def wait_copied(self, *, weights_only: bool = False) -> None:
        """Wait until a background save has copied the state (or the weights)."""
        self.saves.wait_copied(weights_only=weights_only)

    def save_is_done(self) -> bool:
        """Whether no save is running; does not block.

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
        """
        return self.saves.is_done()

    def close(self) -> None:
        """Leave all process groups."""
        parallel.destroy()

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
        """Whether this rank computes on a GPU.

        The node of a rank without a GPU may still offer GPUs to Ray: as many as the settings name.
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
        """The position of this rank, with its stack and process groups."""
        return RECORDER.position(progress.group_counts())

    def write_flight_record(self, folder: str | Path) -> str | None:
        """Write torch's record of the newest collectives; return its path, None without one."""
        return progress.write_flight_record(folder)
