"""The critic of PPO: a value model beside the policy, on the same ranks and at the same layout.

Input: batches of samples, the returns of their tokens. Output: values, optimizer steps,
checkpoints, an exported folder. It has its own weights, gradients, optimizer and learning rate.

Every method is collective, as those of ``rlpost.trainer.actor.Actor``. Invariants are the same: the
loss does not depend on the layout, and a checkpoint holds all that the next step depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from rlpost.algorithm.loss import value_loss
from rlpost.algorithm.partition import partition
from rlpost.columns import FloatColumn
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.errors import CheckpointError
from rlpost.trainer import megatron_checkpoint, optimizer, step
from rlpost.trainer.megatron_checkpoint import Progress, Residence, Saver, Writing
from rlpost.trainer.model_description import ModelDescription
from rlpost.trainer.outcomes import same_on_every_rank
from rlpost.trainer.packing import (
    PackedMicroBatch,
    RowLayout,
    as_trained,
    held_values,
    log_prob_micro_batches,
    pack,
    unpack,
)
from rlpost.trainer.passes import Logprobs, global_metrics, of_all_context_ranks, set_mode
from rlpost.trainer.stop_points import StopPoints
from rlpost.trainer.torch_dist import optimizer_state
from rlpost.trainer.value_model import (
    build_value_model,
    read_value_weights,
    value_config,
    value_inventory,
)
from rlpost.trainer.vision.images import Images
from rlpost.trainer.weights.exporter import Exporter
from rlpost.trainer.weights.folder_export import export_folder
from rlpost.trainer.weights.whole_tensors import weights_hash
from rlpost.types import MicroBatch, TrainBatch

FOLDER = "critic"
"""Subfolder of a checkpoint, and of an exported folder, that holds the critic."""
Values = Logprobs
"""Values before each response token, by micro-batch and sample."""


class Critic:
    """The value model of one rank."""

    def __init__(
        self,
        config: Config,
        description: ModelDescription,
        row_layout: RowLayout,
        stop_points: StopPoints,
        images: Images | None = None,
    ) -> None:
        """Build model and optimizer; needs the process groups.

        ``config`` and ``description`` are those of the policy, and so is the frozen encoder of
        ``images``. The weights are not set: call ``import_weights`` or ``load`` next.
        """
        self.config = of_critic(config)
        self.num_optimizer_steps = 0
        self._description = description
        self._row_layout = row_layout
        self._stop_points = stop_points
        self.chunks = build_value_model(description, self.config)
        if images is not None:
            images.install(self.chunks[0])
        self.model = optimizer.wrap(self.chunks, self.config)
        self.optimizer = optimizer.build(self.model, self.config)
        self.inventory = value_inventory(self.chunks, description)
        self.exporter = Exporter(self.inventory)
        self._saver: Saver | None = None

    def import_weights(self) -> None:
        """Load initial weights, from ``critic_load``, else those of the policy.

        Raises:
            WeightError, CheckpointError: the weights do not fit the model.
        """
        folder = self.config.checkpoint.ref_load or self.config.checkpoint.hf_checkpoint
        read_value_weights(folder, self.chunks, self.inventory, seed=self.config.optimizer.seed)
        optimizer_state.take_model_weights(self.optimizer)

    def values(self, batch: TrainBatch) -> Values:
        """The value before each response token; forward only, on the micro-batches of log-probs.

        Empty on all pipeline stages but the last.

        Raises:
            Interrupted: at one of the stop points.
        """

        def collect(
            index: int, packed: PackedMicroBatch, output: torch.Tensor
        ) -> tuple[torch.Tensor, list[FloatColumn]]:
            values_R = _response_values(output, packed)
            return values_R.sum(), unpack(of_all_context_ranks(values_R, packed), packed)

        set_mode(self.model, training=False)
        with torch.no_grad():
            by_micro_batch = step.run(
                self.model,
                self._pack(log_prob_micro_batches(batch)),
                loss_of=collect,
                forward_only=True,
                stop_points=self._stop_points,
            )
        return as_trained(by_micro_batch, batch)

    def train_step(
        self, batch: TrainBatch, values: Values | None, returns: Sequence[FloatColumn]
    ) -> dict[str, float]:
        """Run one optimizer step towards the returns.

        Args:
            batch: this rank's micro-batches.
            values: as ``values`` returned them before the first step of the rollout; None on all
                pipeline stages but the last.
            returns: of the response tokens, for each of ``batch.samples``.

        Returns:
            The metrics of the loss, train/critic_grad_norm and train/critic_lr; equal on all ranks.

        Raises:
            TrainingError: a metric or a gradient is not finite. Weights and optimizer are unchanged.
            Interrupted: at one of the stop points. Weights, optimizer and random generators are
                unchanged.
        """
        gradients = partial(self._gradients, batch, values, returns)
        metrics = optimizer.accumulate(
            self.model,
            self.optimizer,
            gradients,
            norm="train/critic_grad_norm",
            where=f"optimizer step {self.num_optimizer_steps + 1} of the critic",
        )
        lr = optimizer.apply_schedule(self.optimizer, self.config, self.num_optimizer_steps)
        optimizer.update(self.optimizer, metrics["train/critic_grad_norm"])
        self.num_optimizer_steps += 1
        return metrics | {"train/critic_lr": lr}

    def _gradients(
        self, batch: TrainBatch, values: Values | None, returns: Sequence[FloatColumn]
    ) -> dict[str, float]:
        packed = self._pack(batch.micro_batches)
        targets = partition(returns, map(len, batch.micro_batches))
        weighting = step.Weighting(
            batch.num_samples, batch.num_tokens, self.config.grpo.calculate_per_token_loss
        )

        def loss_of(index: int, micro_batch: PackedMicroBatch, output: torch.Tensor) -> step.Losses:
            values_R = _response_values(output, micro_batch)
            old_R = held_values(values, index, micro_batch)
            target_R = held_values(targets, index, micro_batch)
            assert old_R is not None and target_R is not None, "the last stage has values"
            loss_R, stats = value_loss(
                values_R, old_R, target_R, value_clip=self.config.critic.value_clip
            )
            return weighting.reduced(loss_R, stats, micro_batch)

        set_mode(self.model, training=True)
        stats = step.run(
            self.model,
            packed,
            loss_of=loss_of,
            forward_only=False,
            stop_points=self._stop_points,
        )
        return global_metrics(stats)

    def start_save(self, folder: str | Path, at_step: int, residence: Residence) -> Writing:
        """Start writing model, optimizer and number of steps into ``folder``/critic.

        Raises:
            CheckpointError: a rank cannot write; raised on every rank.
        """
        own = Path(folder) / FOLDER
        megatron_checkpoint.create_folder(own, at_step)
        optimizer.finish_param_sync(self.model, self.config)
        if self._saver is None:
            self.set_save_buffer(self.config.checkpoint.save_buffer_bytes, residence)
        assert self._saver is not None
        # The random generators are in the policy's part.
        progress = Progress(at_step, self.num_optimizer_steps)
        return self._saver.start(own, progress, with_random_state=False)

    def set_save_buffer(self, num_bytes: int, residence: Residence) -> None:
        """Replace the host buffer of saves by one of ``num_bytes``. Collective."""
        self._saver = Saver(
            self.chunks,
            None if self.config.checkpoint.no_save_optim else self.optimizer,
            buffer_bytes=num_bytes,
            residence=residence,
        )

    def load(self, folder: str | Path) -> None:
        """Restore what ``start_save`` wrote, at any layout.

        Raises:
            CheckpointError: the checkpoint has no critic, or one that does not fit the model.
        """
        saved = Path(folder) / FOLDER
        if not same_on_every_rank(saved.is_dir, CheckpointError):
            raise CheckpointError(
                f"{folder} has no critic, since it was saved without --advantage-estimator ppo; give its weights as "
                "--ref-load of a new run, or use the estimator that it was saved with"
            )
        progress = megatron_checkpoint.load(
            saved,
            chunks=self.chunks,
            optimizer=self.optimizer,
            buffer_bytes=self.config.checkpoint.save_buffer_bytes,
        )
        self.num_optimizer_steps = progress.num_optimizer_steps

    def export(self, folder: str | Path) -> None:
        """Write the critic as a Hugging Face folder with a model for token classification.

        Raises:
            CheckpointError: the folder cannot be written; raised on every rank.
        """
        optimizer.finish_param_sync(self.model, self.config)
        export_folder(
            self.exporter,
            folder,
            template=self.config.checkpoint.hf_checkpoint,
            config=value_config(self._description),
            image_max_pixels=self.config.rollout.image_max_pixels,
        )

    def weights_hash(self, *, max_bytes: int) -> str:
        """Hash of the full weights under their Hugging Face names; the same at every layout."""
        optimizer.finish_param_sync(self.model, self.config)
        return weights_hash(self.inventory, max_bytes=max_bytes)

    def _pack(self, micro_batches: Sequence[MicroBatch]) -> list[PackedMicroBatch]:
        return [pack(micro, self._row_layout) for micro in micro_batches]


def _response_values(output_1T1: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
    """[1, T, 1] -> [R]: the value of the row that predicts each response token."""
    return output_1T1[0, packed.response_index, 0]


def of_critic(config: Config) -> Config:
    """Return the settings of the critic's model; ``config`` are those of the policy.

    It has a separate learning rate and separate initial weights, but neither routing replay nor a
    layer for multi-token prediction.
    """
    critic = config.critic
    return with_values(
        config,
        ref_load=critic.critic_load or config.checkpoint.ref_load,
        lr=config.optimizer.lr if critic.critic_lr is None else critic.critic_lr,
        lr_warmup_iters=critic.critic_lr_warmup_iters,
        lr_warmup_fraction=None,
        lr_warmup_init=0.0,
        enable_mtp_training=False,
        use_rollout_routing_replay=False,
        use_routing_replay=False,
    )
