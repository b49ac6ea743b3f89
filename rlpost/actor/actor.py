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
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlpost.actor import device, megatron_checkpoint, parallel, step
from rlpost.actor.description import read_description
from rlpost.actor.model import build_model
from rlpost.actor.packing import PackedMicroBatch, pack, unpack
from rlpost.actor.parallel import Rendezvous
from rlpost.actor.settings import ActorSettings
from rlpost.types import Bucket, StepResult, TrainBatch
from rlpost.weights.exporter import Exporter, export_folder, weights_hash
from rlpost.weights.importer import import_weights
from rlpost.weights.sync import SyncSender

logger = logging.getLogger(__name__)

Logprobs = list[list[tuple[float, ...]]]
"""Of the response tokens: per micro-batch, per sample."""

METRIC_NAMES = {
    "loss": "train/loss",
    "clip_frac": "train/clip_frac",
    "ppo_kl": "train/ppo_kl",
    "logprob_abs_diff": "train/rollout_logprob_abs_diff",
}


class Actor:
    """One rank of the trainer."""

    def __init__(self, settings: ActorSettings) -> None:
        """Read the architecture. Raises WeightError when it is not supported, ConfigError when it cannot be cut so."""
        self.settings = settings
        self.description = read_description(settings.hf_checkpoint)
        self.description.check_tensor_parallel(settings.tensor_model_parallel_size)

    def setup(self, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        """Join the other ranks and build model and optimizer. The weights come from import_weights or load.

        Raises PlacementError when the layout does not fit the number of ranks.
        """
        settings = self.settings
        device.prepare(num_threads=settings.num_threads)
        parallel.initialise(
            Rendezvous(rank, world_size, master_addr, master_port),
            tensor_model_parallel_size=settings.tensor_model_parallel_size,
            distributed_timeout_minutes=settings.distributed_timeout_minutes,
            seed=settings.seed,
        )
        model = build_model(
            self.description,
            tensor_model_parallel_size=settings.tensor_model_parallel_size,
            sequence_parallel=settings.sequence_parallel,
        )
        self._build_optimizer(model)
        group = parallel.tensor_parallel_group()
        self.num_valid = self.description.num_valid_columns(tp_rank=group.rank(), tp_size=group.size())
        self.exporter = Exporter(
            model, architecture=self.description.architecture, dims=self.description.dims, group=group
        )
        self.sender = SyncSender(
            self.exporter,
            bucket_bytes=settings.update_weight_buffer_size,
            data_parallel_rank=self.data_parallel_rank,
            backend=device.backend(),
            timeout_s=60.0 * settings.distributed_timeout_minutes,
        )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
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
        group = parallel.tensor_parallel_group()
        import_weights(
            self.model.module,
            self.settings.hf_checkpoint,
            architecture=self.description.architecture,
            dims=self.description.dims,
            tp_rank=group.rank(),
            tp_size=group.size(),
        )
        self.optimizer.reload_model_params()

    def compute_logprobs(self, batch: TrainBatch) -> Logprobs:
        """Log-probs of all response tokens under the current weights, forward only."""
        packed = self._pack(batch)
        loss = self._micro_batch_loss(batch)

        def collect(index: int, micro_batch: PackedMicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, list]:
            logprobs_R = loss.logprobs(logits, micro_batch)
            return logprobs_R.sum(), unpack(logprobs_R, micro_batch)

        self.model.eval()
        with torch.no_grad():
            return step.run(self.model, packed, loss_of=collect, forward_only=True)

    def train_step(self, batch: TrainBatch, old_logprobs: Logprobs | None = None) -> StepResult:
        """One optimizer step on this rank's part of the batch.

        Args: ``old_logprobs`` as ``compute_logprobs`` returns them; without them the ratio is 1 and only its gradient
        counts (one step a rollout). Returns the metrics of METRIC_NAMES and train/grad_norm (before clipping) and
        train/lr, equal on every rank.
        """
        packed = self._pack(batch)
        old = [None] * len(packed) if old_logprobs is None else [_flat(samples) for samples in old_logprobs]
        loss = self._micro_batch_loss(batch)
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        stats = step.run(
            self.model,
            packed,
            loss_of=lambda index, micro_batch, logits: loss.loss(micro_batch, old[index], logits),
            forward_only=False,
        )
        self._apply_schedule()
        _, grad_norm, _ = self.optimizer.step()
        metrics = self._global_sums(stats)
        return StepResult(metrics | {"train/grad_norm": float(grad_norm), "train/lr": self.settings.lr})

    def save(self, folder: str | Path, step: int) -> None:
        """Write model, optimizer and ``step`` into ``folder``, which is made if missing; one part of a commit.

        Raises CheckpointError when any rank cannot write.
        """
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        dist.barrier()
        megatron_checkpoint.save(folder, model=self.model.module, optimizer=self.optimizer, step=step)

    def load(self, folder: str | Path) -> int:
        """Restore what ``save`` wrote, at any layout, and return its step. Learning rate and weight decay are those of
        the settings, not of the checkpoint. Raises CheckpointError when it does not fit."""
        return megatron_checkpoint.load(folder, model=self.model.module, optimizer=self.optimizer)

    def export(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder with configuration and tokenizer."""
        export_folder(self.exporter, folder, template=self.settings.hf_checkpoint, writes=dist.get_rank() == 0)
        dist.barrier()

    def weights_hash(self) -> str:
        """A hash of the full weights under their Hugging Face names: the same at every layout."""
        return weights_hash(self.exporter, max_bytes=self.settings.update_weight_buffer_size)

    def plan_sync(self) -> tuple[Bucket, ...]:
        """What ``send_bucket`` sends, by index."""
        return self.sender.plan()

    def connect_engines(self, master_addr: str, master_port: int, num_engine_ranks: int, group_name: str) -> None:
        """Form a group with the engines, which join at the address meanwhile; raises SyncError at the deadline."""
        self.sender.connect(master_addr, master_port, num_engine_ranks=num_engine_ranks, group_name=group_name)

    def send_bucket(self, bucket_index: int) -> None:
        """Broadcast one bucket to the engines, which receive meanwhile; raises SyncError at the deadline."""
        self.sender.send(bucket_index)

    def disconnect_engines(self) -> None:
        """Leave the group with the engines."""
        self.sender.disconnect()

    def close(self) -> None:
        """Leave all groups."""
        if hasattr(self, "sender"):
            self.sender.disconnect()
        parallel.destroy()

    def _build_optimizer(self, model: torch.nn.Module) -> None:
        settings = self.settings
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(model.config, ddp_config, model)
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
        )
        chained = get_megatron_optimizer(optimizer_config, [self.model])
        (self.optimizer,) = getattr(chained, "chained_optimizers", [chained])
        assert isinstance(self.optimizer, DistributedOptimizer)
        model.config.finalize_model_grads_func = step.finalize_summed_grads
        model.config.grad_scale_func = self.optimizer.scale_loss

    def _apply_schedule(self) -> None:
        """Constant learning rate; no weight decay on norms, which Megatron marks with ``wd_mult`` but still decays."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.settings.weight_decay * group.get("wd_mult", 1.0)

    def _pack(self, batch: TrainBatch) -> list[PackedMicroBatch]:
        multiple = self.settings.tensor_model_parallel_size if self.settings.sequence_parallel else 1
        return [pack(micro, multiple_of=multiple).to(device.current()) for micro in batch.micro_batches]

    def _micro_batch_loss(self, batch: TrainBatch) -> step.MicroBatchLoss:
        return step.MicroBatchLoss(
            self.settings, num_valid=self.num_valid, num_samples=batch.num_samples, num_tokens=batch.num_tokens
        )

    def _global_sums(self, stats: Sequence[step.Stats]) -> dict[str, float]:
        """Sums over micro-batches and data-parallel ranks; the terms carry their global denominators already."""
        names = list(METRIC_NAMES)
        sums = torch.stack([torch.stack([one[name] for one in stats]).sum() for name in names])
        dist.all_reduce(sums, group=parallel.data_parallel_group())
        return {METRIC_NAMES[name]: value for name, value in zip(names, sums.tolist(), strict=True)}


def _flat(samples: Sequence[Sequence[float]]) -> torch.Tensor:
    values = [value for sample in samples for value in sample]
    return torch.tensor(values, dtype=torch.float32, device=device.current())
