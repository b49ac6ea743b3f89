"""The actor: the Megatron training role of one rank.

Input: weights, and batches of samples with advantages. Output: log-probs, optimizer steps,
checkpoints, and weights for the engines.

A plain class with one process per rank. Every method except the constructor is collective: call it
on every rank, in the same order. Only ``stop_points``, ``broadcast.abort``, ``position`` and
``write_flight_record`` are for a second thread.

Invariants: the loss does not depend on the layout or on micro-batching. Metrics are global means
and equal on every rank. A checkpoint contains everything that the next step depends on, including
the random generators of every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from common.attempt import attempt_secret
from rlpost.columns import FloatColumn
from rlpost.config.plan.weight_update import SHARED_BUFFERS, SMALLEST
from rlpost.config.tree import Config
from rlpost.trainer import (
    device,
    frozen,
    megatron_checkpoint,
    muon,
    optimizer,
    parallel,
    weight_files,
)
from rlpost.trainer.critic import Critic
from rlpost.trainer.initial_weights import read_encoder, read_initial_weights
from rlpost.trainer.kept_weights import ReferenceWeights
from rlpost.trainer.logprobs import scores_of_server
from rlpost.trainer.lora.adapters import Adapters, checkpoint_settings
from rlpost.trainer.memory import DeviceMemory, wait_until_free
from rlpost.trainer.model import build_model, inventory_of
from rlpost.trainer.model_description import ModelDescription
from rlpost.trainer.mtp import MtpTraining
from rlpost.trainer.old_policy import OldPolicy
from rlpost.trainer.own_time import OWN_TIME
from rlpost.trainer.passes import Logprobs, Passes
from rlpost.trainer.rank import Rank
from rlpost.trainer.routing_replay import RoutingReplay
from rlpost.trainer.saves import Saves
from rlpost.trainer.torch_dist import optimizer_state
from rlpost.trainer.vision.images import build_images
from rlpost.trainer.weights.engine_group import TrainerRank
from rlpost.trainer.weights.exporter import Exporter
from rlpost.trainer.weights.importer import HuggingFaceFolder
from rlpost.trainer.weights.shard_sources import ShardSources
from rlpost.trainer.weights.shard_transport import ShardTransport
from rlpost.trainer.weights.trainer_side import Broadcast, Buckets, Sharing
from rlpost.trainer.weights.whole_tensors import weights_hash
from rlpost.types import Bucket, StepPlace, StepResult, TrainBatch


class Actor(Rank):
    """One rank of the trainer."""

    saves: Saves
    # Parts that the driver calls; set by ``build``, like ``saves``.
    memory: DeviceMemory
    old_policy: OldPolicy
    sharing: Sharing
    broadcast: Broadcast
    shards: ShardTransport
    profiling: Profiling

    def __init__(
        self,
        config: Config,
        description: ModelDescription | None = None,
        *,
        run_folder: str | Path | None = None,
    ) -> None:
        """Read the architecture of the policy; see ``Rank``. ``run_folder`` has the images."""
        super().__init__(config, description)
        self._run_folder = run_folder
        self._reference: ReferenceWeights | Adapters | None = None
        self._adapters: Adapters | None = None
        self.num_optimizer_steps = 0  # completed so far; the learning rate depends on it

    def build(self) -> None:
        """Build model and optimizer of this rank; needs the process groups."""
        config = self.config
        self.chunks = build_model(self.description, config)
        self.images = build_images(config, self.description, self._run_folder)
        if self.images is not None:
            self.images.install(self.chunks[0])
        # Again, because patterns may name what is trained of the encoder.
        frozen.freeze_by_name(self.chunks, config, tied=self.description.tied)
        frozen.check_frozen(self.chunks, config, stage=parallel.pipeline_group().rank())
        self.model = optimizer.wrap(self.chunks, config)
        self.optimizer = optimizer.build(self.model, config)
        group = parallel.tensor_parallel_group()
        num_valid = self.description.num_valid_columns(tp_rank=group.rank(), tp_size=group.size())
        self.row_layout = self.made_row_layout()
        self.passes = Passes(
            self.model,
            config,
            num_valid=num_valid,
            row_layout=self.row_layout,
            routing=RoutingReplay(self.chunks, config, self.row_layout, self.description.fields),
            mtp=self._mtp_training(),
            stop_points=self.stop_points,
        )
        self.inventory = inventory_of(self.chunks, self.description)
        if config.optimizer.optimizer == "muon":
            muon.install(self.optimizer, self.inventory, config)
        if config.use_critic:
            shared = self.row_layout, self.stop_points, self.images
            self.critic = Critic(config, self.description, *shared)
        if config.lora.lora_rank is not None:
            self._reference = self._adapters = Adapters(self.chunks, self.inventory)
        elif config.grpo.needs_reference:
            self._reference = ReferenceWeights(
                self.inventory, self._read_initial_weights, prepare=self._settle_weights
            )
        self.old_policy = OldPolicy(
            config, self.inventory, prepare=self._settle_weights, reference=self._reference
        )
        self.exporter = Exporter(self.inventory)
        self.buckets = Buckets(
            self.exporter,
            limit=config.sync.update_weight_buffer_size,
            num_engines=config.num_engines,
            device_bytes=parallel.smallest(device.total_memory()),
            quantisation=HuggingFaceFolder(config.checkpoint.hf_checkpoint).quantisation,
        )
        self.sharing = Sharing(self.buckets)
        timeout_s = 60.0 * config.cluster.distributed_timeout_minutes
        # External engines know torch's own store alone.
        secret = None if config.sglang.rollout_external_engine_addrs else attempt_secret()
        self.broadcast = Broadcast(
            self.buckets,
            gathers=parallel.holds_first_copy(),
            is_source=parallel.is_source_of_stage(),
            backend=device.backend(),
            timeout_s=timeout_s,
            secret=secret,
        )
        self.shards = ShardTransport(
            ShardSources(
                self.inventory, self.buckets.quantisation, gathers=parallel.holds_first_copy()
            ),
            rank=TrainerRank(dist.get_rank(), dist.get_world_size()),
            backend=device.backend(),
            timeout_s=timeout_s,
            secret=secret,
        )
        self.piece_bytes = min(config.sync.update_weight_buffer_size, SMALLEST)
        critic = None if self.critic is None else (self.critic.model, self.critic.optimizer)
        self.memory = DeviceMemory(
            self.model,
            self.optimizer,
            critic,
            frozen=[] if self.images is None else [self.images.tower.module],
            communicators=self.communicators(),
        )
        self.saves = Saves(config, self.chunks, self.optimizer, self.memory, self.critic)
        self.profiling = Profiling(dist.get_rank())

    @property
    def bucket_plan(self) -> Sequence[Bucket]:
        """Names, shapes and dtypes of the buckets of weights; equal on every rank."""
        return self.buckets.plan

    @property
    def broadcast_backend(self) -> str:
        """``nccl`` or ``gloo``."""
        return self.broadcast.backend

    @property
    def sync_stage(self) -> int | None:
        """The pipeline stage whose weights this rank sends; None when it sends none."""
        return self.broadcast.stage if self.broadcast.is_source else None

    def import_weights(self) -> None:
        """Load the initial weights.

        They come from ``ref_load`` if set, else from ``hf_checkpoint``; those of the critic from
        ``critic_load`` if set.

        Raises:
            WeightError, CheckpointError: the weights do not fit the model.
        """
        self._read_initial_weights()
        read_encoder(self.config, self.images, untrained_alone=True)
        if self._adapters is not None:
            self._adapters.initialise(self.config.optimizer.seed)
        optimizer_state.take_model_weights(self.optimizer)
        self.old_policy.start(0)
        if self.critic is not None:
            self.critic.import_weights()

    def compute_logprobs(self, batch: TrainBatch) -> Logprobs:
        """Log-probs of all response tokens under the current weights; forward only.

        Empty on all pipeline stages but the last.
        """
        self.old_policy.swap_out()
        return self.passes.logprobs(batch, records_routes=True)

    def compute_old_logprobs(self, batch: TrainBatch, version: int) -> Logprobs:
        """As ``compute_logprobs``, under the policy's weights of ``version``.

        Raises:
            SyncError: this rank does not have that version.
        """
        with self.old_policy.swapped_in(version):
            return self.passes.logprobs(batch, records_routes=True)

    def train_step(
        self,
        batch: TrainBatch,
        old_logprobs: Logprobs | None = None,
        advantages: Sequence[float | FloatColumn] | None = None,
        place: StepPlace | None = None,
    ) -> StepResult:
        """Run one optimizer step on this rank's part of the batch.

        Args:
            batch: this rank's micro-batches.
            old_logprobs: as ``compute_logprobs`` returns them. Without them the ratio is 1 and only
                its gradient counts (one step per rollout).
            advantages: replace those of the batch, see ``TrainBatch.with_advantages``.
            place: of the step in the run. Without one the weights are of no version afterwards, and
                engines cannot get them.

        Returns:
            The metrics of the objective, train/grad_norm (before clipping) and train/lr; equal on
            every rank.

        Raises:
            TrainingError: a metric or a gradient is not finite. Weights and optimizer are unchanged.
            Interrupted: at one of the ``stop_points``. Weights, optimizer and random generators are
                unchanged.
        """
        self.old_policy.swap_out()
        if advantages is not None:
            batch = batch.with_advantages(advantages)
        ref_logprobs = self.compute_ref_logprobs(batch) if self.config.grpo.use_kl_loss else None
        teacher = None
        if self.config.distillation.distils_in_loss:
            top_k, vocab_size = self.config.distillation.opd_top_k, self.description.dims.vocab_size
            teacher = scores_of_server(batch, top_k=top_k, vocab_size=vocab_size)
        if self.config.grpo.enable_mtp_training:  # it reads the embedding before the forward pass
            self._finish_param_sync()
        gradients = partial(self.passes.gradients, batch, old_logprobs, ref_logprobs, teacher)
        metrics = optimizer.accumulate(
            self.model,
            self.optimizer,
            gradients,
            norm="train/grad_norm",
            where=f"{self._step_name(place)}, {self.config.loss_settings.loss_name}",
            with_mtp=self.config.grpo.enable_mtp_training,
        )
        lr = optimizer.apply_schedule(self.optimizer, self.config, self.num_optimizer_steps)
        self.wait_copied()
        self.old_policy.before_step(place)
        optimizer.update(self.optimizer, metrics["train/grad_norm"])
        self.num_optimizer_steps += 1
        if place is not None and place.is_last and place.updates_reference:
            assert isinstance(self._reference, ReferenceWeights), "the settings have no reference"
            self._reference.take()
        self.old_policy.after_step(place)
        return StepResult(metrics | {"train/lr": lr}, own_s=OWN_TIME.seconds())

    def _step_name(self, place: StepPlace | None) -> str:
        if place is None:
            return f"optimizer step {self.num_optimizer_steps + 1}"
        return f"rollout {place.rollout}, optimizer step {place.step} of {place.of}"

    @property
    def versions(self) -> tuple[int, int | None]:
        """The version of the loaded policy, and an older one that this rank has as well, if any."""
        return self.old_policy.own_versions[-1], self.old_policy.older_version

    def compute_ref_logprobs(self, batch: TrainBatch) -> Logprobs:
        """As ``compute_logprobs``, under the reference weights."""
        assert self._reference is not None, "reference weights need use_kl_loss or kl_coef"
        self.old_policy.swap_out()  # it shares memory with the reference
        self._settle_weights()
        with self._reference.swapped_in():
            return self.passes.logprobs(batch, records_routes=False)

    def save(self, folder: str | Path, step: int, *, in_background: bool = False) -> None:
        """Write model, optimizer (not with ``no_save_optim``) and ``step`` into ``folder``.

        This is one part of a commit; a missing folder is created. With ``in_background`` the call
        returns at once: the state passes through a host buffer of ``save_buffer_gb`` while training
        continues. The next change of the state waits until it is copied, and ``save_is_done``
        tells when the files are written.

        Raises:
            CheckpointError: a rank cannot write; raised on every rank.
        """
        self.old_policy.swap_out()
        self.saves.finish_leniently()
        megatron_checkpoint.create_folder(Path(folder), step)
        self._finish_param_sync()
        buffer_bytes = self.config.checkpoint.save_buffer_bytes
        if isinstance(self._reference, ReferenceWeights) and self._reference.was_updated:
            self._reference.save(folder, self.chunks, buffer_bytes=buffer_bytes)
        self.old_policy.save(folder, self.chunks, buffer_bytes=buffer_bytes)
        versions = self.old_policy.own_versions
        oldest = versions.start if versions else None
        done = megatron_checkpoint.Progress(step, self.num_optimizer_steps, oldest)
        self.saves.start(folder, done, in_background=in_background)

    def load(self, folder: str | Path, *, is_compared: bool = False) -> int:
        """Restore a checkpoint of any layout and return its step.

        Learning rate, weight decay, betas and epsilon come from the settings, not from the
        checkpoint. ``is_compared``: the driver has just compared its files with their digests.

        Raises:
            CheckpointError: a file is damaged, or the checkpoint does not fit the model.
        """
        self.wait_copied()
        if not is_compared:
            megatron_checkpoint.compare(folder)
        # A checkpoint has only what is trained.
        read_encoder(self.config, self.images, untrained_alone=True)
        if self._adapters is not None:  # a checkpoint has the adapters alone
            self._read_initial_weights()
        elif isinstance(self._reference, ReferenceWeights):
            self._reference.load(folder, self.chunks)
        self.old_policy.load(folder, self.chunks)
        progress = megatron_checkpoint.load(
            folder,
            chunks=self.chunks,
            optimizer=self.optimizer,
            buffer_bytes=self.config.checkpoint.save_buffer_bytes,
            adapters=checkpoint_settings(self.config),
        )
        self.num_optimizer_steps = progress.num_optimizer_steps
        self.old_policy.start(progress.step, progress.policy_version)
        if self.critic is not None:
            self.critic.load(folder)
        return progress.step

    def export(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder; see ``weight_files.export``."""
        self._finish_param_sync()
        weight_files.export(self.exporter, self.inventory, folder, self.description, self.config)

    def write_engine_folder(self, folder: str | Path, version: int) -> int | None:
        """Write what engines read: all weights, with adapters merged, or the adapters alone.

        Returns:
            Bytes of the adapters on the writing rank; otherwise None.

        Raises:
            CheckpointError: the folder cannot be written; raised on every rank.
            SyncError: this rank does not have that version of the policy.
        """
        with self.old_policy.swapped_in(version):
            self._finish_param_sync()
            if self.config.sync.update_weight_mode == "adapter":
                return weight_files.write_adapters(self.inventory, Path(folder), self.config)
            units = self.shards.list_units()
            weight_files.export_merged(self.exporter, folder, self.description, self.config, units)
            return None

    def weights_hash(self) -> str:
        """Hash of the full weights under their Hugging Face names; the same at every layout."""
        self._finish_param_sync()
        return weights_hash(self.inventory, max_bytes=self.piece_bytes)

    def send_bucket(self, index: int) -> None:
        """Broadcast one bucket to the engines, which receive at the same time.

        Raises:
            SyncError: an engine did not receive it before the deadline.
        """
        self._finish_param_sync()
        self.broadcast.send(index)

    def share_bucket(self, index: int) -> str:
        """Share one bucket with the engine on this rank's GPU; returns its handle."""
        self._finish_param_sync()
        if not self.sharing.pieces:
            wait_until_free(SHARED_BUFFERS * self.buckets.largest_bytes(), "shared buckets")
        return self.sharing.share(index)

    def pack_shards(self, index: int) -> None:
        """Pack this rank's part of a bucket for the engine ranks."""
        self._finish_param_sync()
        self.shards.pack(index)

    def share_shards(self, index: int, message: Mapping[str, object]) -> str:
        """Exchange a bucket; return the handle of what the engine on this rank's GPU holds of it."""
        self._finish_param_sync()
        if not self.shards.buffers.pieces:
            wait_until_free(SHARED_BUFFERS * self.shards.largest_shared_bytes(), "shared buckets")
        return self.shards.share(index, message)

    def close(self) -> None:
        """Leave all process groups."""
        if hasattr(self, "broadcast"):
            self.broadcast.disconnect()
        if hasattr(self, "shards"):
            self.shards.disconnect()
        super().close()

    def _read_initial_weights(self) -> None:
        read_initial_weights(self.config, self.chunks, self.inventory, self.images)

    def _mtp_training(self) -> MtpTraining | None:
        if not self.config.grpo.enable_mtp_training:
            return None
        return MtpTraining(self.chunks, scaling_factor=self.config.grpo.mtp_loss_scaling_factor)

    def _settle_weights(self) -> None:
        """Wait for everything that reads or writes the weights; call before swapping them."""
        self._finish_param_sync()
        self.wait_copied(weights_only=True)

    def _finish_param_sync(self) -> None:
        optimizer.finish_param_sync(self.model, self.config)


logger = logging.getLogger(__name__)

MAX_ALLOCATIONS = 200_000


class Profiling:
    """Records torch profiles and the history of GPU memory, for selected steps of one rank.

    Output: ``profile-rank0-steps-10-11.json.gz`` (a Chrome trace of operators and kernels) and
    ``memory-rank0-steps-10-11.pickle`` (for pytorch.org/memory_viz). No cost outside these steps.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profiler: profile | None = None
        self._records_memory = False

    def begin(self, ranks: Sequence[int], *, operators: bool, memory: bool) -> None:
        """Start recording if this rank is in ``ranks``; ``memory`` without CUDA logs a warning."""
        if self._rank not in ranks:
            return
        if memory and not torch.cuda.is_available():
            logger.warning(
                "--record-memory-history: rank %d has no CUDA device, nothing is recorded",
                self._rank,
            )
        elif memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
            self._records_memory = True
        if operators:
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._profiler.start()

    def end(self, folder: str, steps: str) -> list[str]:
        """Stop recording, write the files and return their paths.

        A missing ``folder`` is created; ``steps`` is a part of the file names.
        """
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        written = []
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            written.append(f"{folder}/profile-rank{self._rank}-steps-{steps}.json.gz")
            profiler.export_chrome_trace(written[-1])
        if self._records_memory:
            self._records_memory = False
            written.append(f"{folder}/memory-rank{self._rank}-steps-{steps}.pickle")
            torch.cuda.memory._dump_snapshot(written[-1])
            torch.cuda.memory._record_memory_history(enabled=None)
        return written
