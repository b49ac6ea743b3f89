"""The teacher of on-policy distillation: a second model, in host memory between its passes.

Input: the settings of the run, and batches of samples. Output: log-probs of the response tokens
under the teacher.

The teacher may be of another family and size. It is sharded as the policy is: tensor, pipeline,
context and expert parallelism have the same sizes. Its parameters have no gradients and no
optimizer. Invariant: outside a pass its weights take no memory of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlpost.config.tree import Config
from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.trainer import device, megatron_checkpoint, parallel
from rlpost.trainer.logprobs import TopTokens
from rlpost.trainer.memory import HostCopy, bytes_of, drop_fp8_copies, storages
from rlpost.trainer.model import build_model, inventory_of
from rlpost.trainer.packing import RowLayout
from rlpost.trainer.passes import Logprobs, Passes
from rlpost.trainer.routing_replay import RoutingReplay
from rlpost.trainer.stop_points import StopPoints
from rlpost.trainer.teacher_description import teacher_config, teacher_description
from rlpost.trainer.weights.importer import HuggingFaceFolder, import_weights
from rlpost.types import TrainBatch


class Teacher:
    """This rank's shard of the teacher. Every method is collective."""

    def __init__(self, config: Config, *, row_layout: RowLayout, stop_points: StopPoints) -> None:
        """Build the teacher and read its weights. Needs parallel state.

        ``config`` and ``row_layout`` are those of the policy.

        Raises:
            ConfigError: the teacher cannot be sharded as the policy is.
            WeightError, CheckpointError: the weights do not fit its configuration.
        """
        assert config.distillation.opd_teacher_load is not None, (
            "teacher_in_trainer requires --opd-teacher-load"
        )
        own, description = teacher_config(config), teacher_description(config)
        chunks = build_model(description, own)
        for chunk in chunks:
            chunk.requires_grad_(False)
        folder = config.distillation.opd_teacher_load
        if find_checkpoint(folder) is None:
            import_weights(inventory_of(chunks, description), HuggingFaceFolder(folder))
        else:
            megatron_checkpoint.load_weights(folder, chunks=chunks)
        group = parallel.tensor_parallel_group()
        self._passes = Passes(
            chunks,
            own,
            num_valid=description.num_valid_columns(tp_rank=group.rank(), tp_size=group.size()),
            row_layout=row_layout,
            routing=RoutingReplay(chunks, own, row_layout, description.fields),
            mtp=None,
            stop_points=stop_points,
        )
        self._weights = OffloadedWeights(chunks)

    def logprobs(self, batch: TrainBatch) -> Logprobs:
        """Compute log-probs of all response tokens under the teacher, as ``Passes.logprobs`` does.

        Raises:
            Interrupted: at one of the stop points.
        """
        with self._weights.on_device():
            return self._passes.logprobs(batch, records_routes=False)

    def top_tokens(self, batch: TrainBatch, *, count: int, limit: int) -> list[list[TopTokens]]:
        """Compute the teacher's most likely tokens, as ``Passes.top_tokens`` does.

        Raises:
            Interrupted: at one of the stop points.
        """
        with self._weights.on_device():
            return self._passes.top_tokens(batch, count=count, limit=limit)


class OffloadedWeights:
    """Constant weights whose device memory is free outside ``on_device``."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        """Copy all parameters and buffers to host memory and free their storage on the device."""
        self._chunks = chunks
        tensors = [tensor.data for chunk in chunks for tensor in chunk.parameters()]
        tensors += [tensor for chunk in chunks for tensor in chunk.buffers()]
        self._copies = [
            (storage, HostCopy(bytes_of(storage)), storage.nbytes())
            for storage in storages(tensors)
        ]
        self._free()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the weights are on the device."""
        for storage, host, size in self._copies:
            storage.resize_(size)
            host.fill(bytes_of(storage))
        device.synchronise()
        try:
            yield
        finally:
            device.synchronise()
            self._free()

    def _free(self) -> None:
        for storage, _, _ in self._copies:
            storage.resize_(0)
        drop_fp8_copies(self._chunks)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
