"""The actor: the Megatron training role of one rank.

In: weights, and batches of samples with advantages. Out: log-probs, optimizer steps, checkpoints, and weights for the
engines. A plain class in one process a rank; every method except the constructor is collective: all ranks call it, in
the same order. Invariants: the loss does not depend on the layout or on micro-batching; metrics are global means and
equal on every rank; nothing here draws random numbers while training (dropout is 0), so a checkpoint needs none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from rlpost.actor import device, megatron_checkpoint, parallel, step
from rlpost.actor.description import read_description
from rlpost.actor.model import build_model
from rlpost.actor.packing import Cut, PackedMicroBatch, pack, unpack
from rlpost.actor.parallel import Rendezvous
from rlpost.actor.reference import ReferenceWeights
from rlpost.actor.settings import ActorSettings
from rlpost.types import Bucket, StepResult, TrainBatch
from rlpost.weights.exporter import Exporter, export_folder, weights_hash
from rlpost.weights.importer import import_weights
from rlpost.weights.inventory import Inventory
from rlpost.weights.sync import SyncSender

logger = logging.getLogger(__name__)

Logprobs = list[list[tuple[float, ...]]]
"""Of the response tokens: per micro-batch, per sample."""

METRIC_NAMES = {
    "loss": "train/loss",
    "clip_frac": "train/clip_frac",
    "ppo_kl": "train/ppo_kl",
    "logprob_abs_diff": "train/rollout_logprob_abs_diff",
    "ref_kl": "train/ref_kl",
}


class Actor:
    """One rank of the trainer."""

    def __init__(self, settings: ActorSettings) -> None:
        """Read the architecture. Raises WeightError when it is not supported, ConfigError when it cannot be cut so."""
        self.settings = settings
        self._reference: ReferenceWeights | None = None
        self.description = read_description(settings.hf_checkpoint)
        self.description.check_layout(settings)

    def setup(self, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        """Join the other ranks and build model and optimizer. The weights come from import_weights or load.

        Raises PlacementError when the layout does not fit the number of ranks.
        """
        settings = self.settings
        device.prepare(num_threads=settings.num_threads)
        parallel.initialise(
            Rendezvous(rank, world_size, master_addr, master_port),
            settings,
            num_virtual_stages=self.description.num_virtual_stages(settings),
        )
        self._build_optimizer(build_model(self.description, settings))
        group = parallel.tensor_parallel_group()
        self.num_valid = self.description.num_valid_columns(tp_rank=group.rank(), tp_size=group.size())
        self.cut = Cut(
            row_multiple=settings.row_multiple,
            sequence_multiple=settings.sequence_multiple,
            context_rank=parallel.context_parallel_group().rank(),
            context_size=settings.context_parallel_size,
        )
        self.inventory = Inventory(
            [chunk.module for chunk in self.model],
            family=self.description.family,
            dims=self.description.dims,
            groups=parallel.weight_groups(),
            tied=self.description.tied,
        )
        if settings.use_kl_loss:
            self._reference = ReferenceWeights(self.inventory, settings.hf_checkpoint)
        self.exporter = Exporter(self.inventory)
        self.sender = SyncSender(
            self.exporter,
            bucket_bytes=settings.update_weight_buffer_size,
            gathers=parallel.holds_first_copy(),
            backend=device.backend(),
            timeout_s=60.0 * settings.distributed_timeout_minutes,
        )
        num_parameters = sum(parameter.numel() for chunk in self.model for parameter in chunk.parameters())
        logger.info("rank %d of %d: %d parameters on %s", rank, world_size, num_parameters, device.current())

    @property
    def data_parallel_rank(self) -> int:
        """Which TrainBatch is this rank's."""
        return parallel.data_parallel_rank()

    @property
    def sync_backend(self) -> str:
        """What the group with the engines runs on: nccl or gloo."""
        return self.sender.backend

    def import_weights(self) -> None:
        """Fill the model from ``hf_checkpoint``; raises WeightError when it does not fit."""
        import_weights(self.inventory, self.settings.hf_checkpoint)
        self.optimizer.reload_model_params()

    def compute_logprobs(self, batch: TrainBatch) -> Logprobs:
        """Log-probs of all response tokens under the current weights, forward only; empty on all pipeline stages but
        the last."""
        packed = self._pack(batch)
        loss = self._micro_batch_loss(batch)

        def collect(index: int, micro_batch: PackedMicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, list]:
            logprobs_R = loss.logprobs(logits, micro_batch)
            return logprobs_R.sum(), unpack(_of_all_context_ranks(logprobs_R, micro_batch), micro_batch)

        self._set_mode(training=False)
        with torch.no_grad():
            return step.run(self.model, packed, loss_of=collect, forward_only=True)

    def train_step(self, batch: TrainBatch, old_logprobs: Logprobs | None = None) -> StepResult:
        """One optimizer step on this rank's part of the batch.

        Args: ``old_logprobs`` as ``compute_logprobs`` returns them; without them the ratio is 1 and only its gradient
        counts (one step a rollout). Returns the metrics of METRIC_NAMES and train/grad_norm (before clipping) and
        train/lr, equal on every rank.
        """
        packed = self._pack(batch)
        old = _held(old_logprobs, packed)
        ref = _held(self._reference_logprobs(batch), packed)
        loss = self._micro_batch_loss(batch)
        self._set_mode(training=True)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        stats = step.run(
            self.model,
            packed,
            loss_of=lambda index, micro_batch, logits: loss.loss(micro_batch, old[index], ref[index], logits),
            forward_only=False,
        )
        self._apply_schedule()
        _, grad_norm, _ = self.optimizer.step()
        metrics = self._global_sums(stats)
        return StepResult(metrics | {"train/grad_norm": float(grad_norm), "train/lr": self.settings.lr})

    def _reference_logprobs(self, batch: TrainBatch) -> Logprobs | None:
        if self._reference is None:
            return None
        self._finish_param_sync()
        with self._reference.swapped_in():
            return self.compute_logprobs(batch)

    def save(self, folder: str | Path, step: int) -> None:
        """Write model, optimizer and ``step`` into ``folder``, which is made if missing; one part of a commit.

        Raises CheckpointError when any rank cannot write.
        """
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        dist.barrier()
        self._finish_param_sync()
        megatron_checkpoint.save(folder, model=self.model, optimizer=self.optimizer, step=step)

    def load(self, folder: str | Path) -> int:
        """Restore what ``save`` wrote, at any layout, and return its step. Learning rate and weight decay are those of
        the settings, not of the checkpoint. Raises CheckpointError when it does not fit."""
        return megatron_checkpoint.load(folder, model=self.model, optimizer=self.optimizer)

    def export(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder with configuration and tokenizer."""
        self._finish_param_sync()
        export_folder(self.exporter, folder, template=self.settings.hf_checkpoint, writes=dist.get_rank() == 0)
        dist.barrier()

    def weights_hash(self) -> str:
        """A hash of the full weights under their Hugging Face names: the same at every layout."""
        self._finish_param_sync()
        return weights_hash(self.exporter, max_bytes=self.settings.update_weight_buffer_size)

    def plan_sync(self) -> tuple[Bucket, ...]:
        """What ``send_bucket`` sends, by index."""
        return self.sender.plan()

    def connect_engines(self, master_addr: str, master_port: int, num_engine_ranks: int, group_name: str) -> None:
        """Form a group with the engines, which join at the address meanwhile; raises SyncError at the deadline."""
        self.sender.connect(master_addr, master_port, num_engine_ranks=num_engine_ranks, group_name=group_name)

    def send_bucket(self, bucket_index: int) -> None:
        """Broadcast one bucket to the engines, which receive meanwhile; raises SyncError at the deadline."""
        self._finish_param_sync()
        self.sender.send(bucket_index)

    def disconnect_engines(self) -> None:
        """Leave the group with the engines."""
        self.sender.disconnect()

    def close(self) -> None:
        """Leave all groups."""
        if hasattr(self, "sender"):
            self.sender.disconnect()
        parallel.destroy()

    def _build_optimizer(self, chunks: Sequence[torch.nn.Module]) -> None:
        settings, config = self.settings, chunks[0].config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=settings.use_distributed_optimizer,
            overlap_grad_reduce=settings.overlap_grad_reduce,
            overlap_param_gather=settings.overlap_param_gather,
        )
        self.model = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            params_dtype=torch.float32,
            use_distributed_optimizer=settings.use_distributed_optimizer,
            overlap_param_gather=settings.overlap_param_gather,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, self.model)
        config.finalize_model_grads_func = step.finalize_summed_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if settings.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _set_mode(self, *, training: bool) -> None:
        for chunk in self.model:
            chunk.train(training)

    def _finish_param_sync(self) -> None:
        """With overlap the other ranks' updates arrive with the next forward pass; whoever reads weights waits here."""
        if self.settings.overlap_param_gather:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)

    def _apply_schedule(self) -> None:
        """Constant learning rate; no weight decay on norms, which Megatron marks with ``wd_mult`` but still decays."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.settings.weight_decay * group.get("wd_mult", 1.0)

    def _pack(self, batch: TrainBatch) -> list[PackedMicroBatch]:
        return [pack(micro, self.cut).to(device.current()) for micro in batch.micro_batches]

    def _micro_batch_loss(self, batch: TrainBatch) -> step.MicroBatchLoss:
        return step.MicroBatchLoss(
            self.settings, num_valid=self.num_valid, num_samples=batch.num_samples, num_tokens=batch.num_tokens
        )

    def _global_sums(self, stats: Sequence[step.Stats]) -> dict[str, float]:
        """Sums over micro-batches and ranks; the terms carry their global denominators already. Only the last pipeline
        stage has terms."""
        names = [name for name in METRIC_NAMES if name != "ref_kl" or self.settings.use_kl_loss]
        sums = torch.zeros(len(names), device=device.current())
        if stats:
            sums = torch.stack([torch.stack([one[name] for one in stats]).sum() for name in names])
        dist.all_reduce(sums, group=parallel.data_parallel_group(with_context_parallel=True))
        if self.settings.pipeline_model_parallel_size > 1:
            dist.all_reduce(sums, group=parallel.pipeline_group())
        return {METRIC_NAMES[name]: value for name, value in zip(names, sums.tolist(), strict=True)}


def _of_all_context_ranks(values_R: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
    """The numbers of all response tokens, from each rank's own."""
    whole = torch.zeros(sum(packed.response_lengths), dtype=values_R.dtype, device=values_R.device)
    whole[packed.held] = values_R
    if parallel.context_parallel_group().size() > 1:
        dist.all_reduce(whole, group=parallel.context_parallel_group())
    return whole


def _held(logprobs: Logprobs | None, packed: Sequence[PackedMicroBatch]) -> list[torch.Tensor | None]:
    """What this rank needs of each micro-batch; only the last pipeline stage is given any, and needs them."""
    if not logprobs:
        return [None] * len(packed)
    return [_flat(samples)[part.held] for samples, part in zip(logprobs, packed, strict=True)]


def _flat(samples: Sequence[Sequence[float]]) -> torch.Tensor:
    values = [value for sample in samples for value in sample]
    return torch.tensor(values, dtype=torch.float32, device=device.current())
