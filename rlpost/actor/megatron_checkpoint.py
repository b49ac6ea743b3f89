"""Model and optimizer in Megatron's distributed checkpoint format (torch_dist).

In: this rank's model and optimizer, and a folder on the shared file system. Out: a checkpoint that any other layout can
read ("fully_reshardable"). This is one part of a commit: ``rlpost.checkpoint`` makes the whole of it durable.
Collective: all ranks call ``save`` and ``load`` together.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer

from rlpost.actor import torch_adam_checkpoint
from rlpost.actor.torch_dist_folder import RELEASE, TRACKER, find_checkpoint
from rlpost.errors import CheckpointError

logger = logging.getLogger(__name__)

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gather optimizer state with gloo to the first data-parallel rank: host memory, and the same path on any device.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""Given to Megatron as copies: it keeps the process groups of the moment in them."""
NUM_WRITER_THREADS = 2


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the training of a checkpoint has come."""

    step: int
    num_optimizer_steps: int


class Writing:
    """A save that goes on in a thread of this process, from a copy in host memory."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when every file is on disk. Raises CheckpointError when a rank could not write, on every rank."""
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(
                f"a checkpoint could not be written in the background: {self._error}"
            ) from self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error


def save(
    folder: str | Path,
    *,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    progress: Progress,
    background: dist.ProcessGroup | None = None,
) -> Writing | None:
    """Write model, optimizer (unless None) and progress into an existing folder; every file is flushed to disk.

    With ``background``, a gloo group of all ranks that nobody else uses meanwhile, this returns as soon as everything
    is copied to host memory, and what is returned must be waited for. Raises CheckpointError when a rank cannot write,
    on every rank.
    """
    state = _state(chunks, optimizer, is_loading=False) | dataclasses.asdict(progress)
    if optimizer is not None:
        state["adam_step"] = torch_adam_checkpoint.step_of(optimizer)
    strategy = InProcessSave(background)
    try:
        dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, content_metadata=dict(METADATA))
    except (OSError, torch_checkpoint.CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint of step {progress.step} could not be written to {folder}: {error}"
        ) from error
    return strategy.writing


def load(folder: str | Path, *, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Progress:
    """Restore model and optimizer from ``folder``, written at any layout.

    A checkpoint without the optimizer's state is loaded all the same, with a warning: Adam then starts anew. Raises
    CheckpointError when the folder does not hold such a checkpoint of this model.
    """
    common = _read(lambda: dist_checkpointing.load_common_state_dict(str(folder)), folder)
    with_optimizer = "adam_step" in common
    loaded = _load(folder, chunks, optimizer if with_optimizer else None)
    if not with_optimizer:
        logger.warning("%s has no state of the optimizer (it was saved with no_save_optim): Adam starts anew", folder)
        optimizer.reload_model_params()
    elif torch_adam_checkpoint.uses_torch_adam(optimizer):
        torch_adam_checkpoint.load(optimizer, loaded["optimizer"], step=common["adam_step"])
    else:
        optimizer.load_state_dict(loaded["optimizer"])
    return Progress(common["step"], common.get("num_optimizer_steps", round(common.get("adam_step", 0))))


def save_weights(folder: str | Path, *, chunks: Sequence[torch.nn.Module]) -> None:
    """Write the weights alone, laid out as Megatron-LM lays out a released model: other tools find them too."""
    release = Path(folder) / RELEASE
    if dist.get_rank() == 0:
        release.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    save(release, chunks=chunks, optimizer=None, progress=Progress(0, 0))
    if dist.get_rank() == 0:
        (Path(folder) / TRACKER).write_text(RELEASE)
    dist.barrier()


def load_weights(folder: str | Path, *, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill the model from the checkpoint in the folder; an optimizer's state there is left alone.

    Raises CheckpointError when that is not a checkpoint of this model.
    """
    found = find_checkpoint(folder)
    if found is None:
        raise CheckpointError(f"{folder} holds no torch_dist checkpoint")
    _load(found, chunks, None)


def _load(folder: str | Path, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None) -> dict[str, Any]:
    """Fill the model, and return all that was read."""
    loaded = _read(lambda: dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), str(folder)), folder)
    for key, chunk in _keyed(chunks):
        chunk.load_state_dict(loaded[key])
    return loaded


def _read(read: Callable[[], dict[str, Any]], folder: str | Path) -> dict[str, Any]:
    try:
        return read()
    except (CheckpointingException, OSError, torch_checkpoint.CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be loaded into this model: {error}") from error


class InProcessSave(SaveShardedStrategy):
    """Megatron's torch_dist format, written by threads of this process with torch's own writer.

    Megatron's writer forks, and spawns a manager that runs ``__main__`` again: neither may happen in a process with
    threads whose ``__main__`` is not ours, such as a worker of a cluster runtime. The files are the same.

    Given a process group it copies everything to host memory, writes in a thread and returns; the copies are nobody
    else's, so that training may go on (shared ones are how later checkpoints came out equal to the first: NeMo-RL issue
    3312, nvidia-resiliency-ext issue 376).
    """

    def __init__(self, background: dist.ProcessGroup | None = None) -> None:
        super().__init__("torch_dist", 1)
        self._background = background
        self.writing: Writing | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the sharded tensors; a failure on one rank is raised on all."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        writer = torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=NUM_WRITER_THREADS, sync_files=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        if self._background is not None:
            _copy_to_host(part for parts in renamed.values() for part in parts)
        state = mcore_to_pyt_state_dict(renamed, False)
        write = partial(
            torch_checkpoint.save, state, storage_writer=writer, planner=planner, process_group=self._background
        )
        if self._background is None:
            write()
        else:
            self.writing = Writing(write)


def _copy_to_host(parts: Iterable[ShardedBase]) -> None:
    """Replace what the parts hold by copies; parts are made anew for each save."""
    for part in parts:
        if isinstance(part, ShardedTensor):
            part.data = torch.empty_like(part.data, device="cpu", pin_memory=part.data.is_cuda).copy_(part.data)
        else:
            part.data = copy.deepcopy(part.data)


def _keyed(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """The chunks under the names that Megatron's optimizers expect; tensors are named by layer, whatever the chunk."""
    single = len(chunks) == 1
    return [("model" if single else f"model{number}", chunk) for number, chunk in enumerate(chunks)]


def _state(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None, *, is_loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=dict(METADATA)) for key, chunk in _keyed(chunks)}
    if optimizer is None:
        return state
    if torch_adam_checkpoint.uses_torch_adam(optimizer):
        torch_adam_checkpoint.prime(optimizer)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=dict(METADATA))
    return state
