"""Model and optimizer in Megatron's distributed checkpoint format (torch_dist).

In: this rank's model and optimizer, and a folder on the shared file system. Out: a checkpoint that any other layout can
read ("fully_reshardable"). This is one part of a commit: ``rlpost.checkpoint`` makes the whole of it durable.
Collective: all ranks call ``save`` and ``load`` together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from rlpost.actor import torch_adam_checkpoint
from rlpost.errors import CheckpointError

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gather optimizer state with gloo to the first data-parallel rank: host memory, and the same path on any device.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
NUM_WRITER_THREADS = 2


def save(
    folder: str | Path, *, model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, step: int
) -> None:
    """Write model, optimizer and ``step`` into an existing folder; every file is flushed to disk.

    Raises CheckpointError when a rank cannot write, on every rank.
    """
    state = _state(model, optimizer, is_loading=False)
    state["step"] = step
    state["adam_step"] = torch_adam_checkpoint.step_of(optimizer)
    try:
        dist_checkpointing.save(state, str(folder), sharded_strategy=InProcessSave(), content_metadata=METADATA)
    except (OSError, torch_checkpoint.CheckpointException) as error:
        raise CheckpointError(f"checkpoint of step {step} could not be written to {folder}: {error}") from error


def load(folder: str | Path, *, model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> int:
    """Restore model and optimizer from ``folder``, written at any layout. Returns the step.

    Raises CheckpointError when the folder does not hold such a checkpoint of this model.
    """
    try:
        loaded = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(folder))
    except (CheckpointingException, OSError, torch_checkpoint.CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be loaded into this model: {error}") from error
    for key, chunk in _keyed(model):
        chunk.load_state_dict(loaded[key])
    if torch_adam_checkpoint.uses_torch_adam(optimizer):
        torch_adam_checkpoint.load(optimizer, loaded["optimizer"], step=loaded["adam_step"])
    else:
        optimizer.load_state_dict(loaded["optimizer"])
    return loaded["step"]


class InProcessSave(SaveShardedStrategy):
    """Megatron's torch_dist format, written by threads of this process with torch's own writer.

    Megatron's writer forks, and spawns a manager that runs ``__main__`` again: neither may happen in a process with
    threads whose ``__main__`` is not ours, such as a worker of a cluster runtime. The files are the same.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the sharded tensors; a failure on one rank is raised on all."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        writer = torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=NUM_WRITER_THREADS, sync_files=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        torch_checkpoint.save(mcore_to_pyt_state_dict(renamed, False), storage_writer=writer, planner=planner)


def _keyed(model: Sequence[DistributedDataParallel]) -> list[tuple[str, torch.nn.Module]]:
    """The chunks under the names that Megatron's optimizers expect; tensors are named by layer, whatever the chunk."""
    single = len(model) == 1
    return [("model" if single else f"model{number}", chunk.module) for number, chunk in enumerate(model)]


def _state(
    model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    if torch_adam_checkpoint.uses_torch_adam(optimizer):
        torch_adam_checkpoint.prime(optimizer)
    state: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=METADATA) for key, chunk in _keyed(model)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=METADATA)
    return state
