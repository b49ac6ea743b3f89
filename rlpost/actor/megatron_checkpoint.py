"""Model and optimizer in Megatron's distributed checkpoint format (torch_dist).

In: this rank's model and optimizer, and a folder on the shared file system. Out: a checkpoint that any other layout can
read ("fully_reshardable"). This is one part of a commit: ``rlpost.checkpoint`` makes the whole of it durable.
Collective: all ranks call ``save`` and ``load`` together.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlpost.actor import host_copies, parallel, random_state, torch_adam_checkpoint
from rlpost.actor.host_copies import Background, HostMemory, OptimizerCopy
from rlpost.actor.torch_dist_folder import RELEASE, TRACKER, find_checkpoint
from rlpost.errors import CheckpointError

logger = logging.getLogger(__name__)

METADATA = {
    "distrib_optim_sharding_type": host_copies.FORMAT,
    # Optimizer state is gathered with gloo to the first data-parallel rank: host memory, and the same path on any
    # device.
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

    @property
    def is_running(self) -> bool:
        """Whether ``wait`` would have to wait."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Return when every file is on disk. Raises CheckpointError when a rank could not write, on every rank."""
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(
                f"a checkpoint could not be written in the background: {_told(self._error)}"
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
    background: Background | None = None,
    with_random_state: bool = True,
) -> Writing | None:
    """Write model, optimizer (unless None), progress and the random generators of all ranks into an existing folder;
    every file of tensors is flushed to disk, and the small ones when the folder is committed.

    With ``background`` this returns as soon as everything is copied to host memory, and what is returned must be waited
    for, also before the next save. Raises CheckpointError when a rank cannot write, on every rank.
    """
    state: dict[str, Any] = _model_state(chunks) | dataclasses.asdict(progress)
    copies: dict[int, OptimizerCopy] = {}
    if optimizer is not None:
        state["optimizer"], copies = _taken(optimizer, state, background)
        state["adam_step"] = torch_adam_checkpoint.step_of(optimizer)
    if with_random_state:
        state |= {"layout": random_state.layout(), random_state.KEY: random_state.sharded()}
    sharded, common = save_preprocess(state | {"content_metadata": dict(METADATA)}, validate_access_integrity=False)
    failed = f"checkpoint of step {progress.step} could not be written to {folder}"
    if problem := parallel.first_problem(_write_small_files(Path(folder), common)):
        raise CheckpointError(f"{failed}: {problem}")
    if background is not None:
        host_copies.copy_parts(_main_replicas(sharded), background.memory)
        host_copies.wait_for_copies()
        return Writing(lambda: _write_sharded(sharded, copies, folder, background.group))
    host_copies.wait_for_copies()
    try:
        _write_sharded(sharded, copies, folder, None)
    except (OSError, CheckpointingException, torch_checkpoint.CheckpointException) as error:
        raise CheckpointError(f"{failed}: {_told(error)}") from error
    return None


def load(folder: str | Path, *, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Progress:
    """Restore model and optimizer from ``folder``, written at any layout.

    A checkpoint without the optimizer's state is loaded all the same, with a warning: Adam then starts anew. Raises
    CheckpointError when the folder does not hold such a checkpoint of this model.
    """
    common = _read(lambda: dist_checkpointing.load_common_state_dict(str(folder)), folder)
    with_optimizer = "adam_step" in common
    is_same_layout = common.get("layout") == random_state.layout()
    loaded = _load(folder, chunks, optimizer if with_optimizer else None, with_random_state=is_same_layout)
    if is_same_layout:
        random_state.restore(loaded[random_state.KEY])
    else:
        logger.info("%s was written at another layout: random generators begin anew from the seed", folder)
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
    save(release, chunks=chunks, optimizer=None, progress=Progress(0, 0), with_random_state=False)
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


def _load(
    folder: str | Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    *,
    with_random_state: bool = False,
) -> dict[str, Any]:
    """Fill the model, and return all that was read."""
    state = _to_load(chunks, optimizer)
    if with_random_state:
        state[random_state.KEY] = random_state.sharded()
    loaded = _read(lambda: dist_checkpointing.load(state, str(folder)), folder)
    for key, chunk in _keyed(chunks):
        chunk.load_state_dict(loaded[key])
    return loaded


def _read(read: Callable[[], dict[str, Any]], folder: str | Path) -> dict[str, Any]:
    try:
        return read()
    except (CheckpointingException, OSError, torch_checkpoint.CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be loaded into this model: {error}") from error


def _told(error: BaseException) -> str:
    """What happened, without the stacks of all ranks that torch puts into its words."""
    if not isinstance(error, torch_checkpoint.CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))


def _write_small_files(folder: Path, common: dict[str, Any]) -> str | None:
    """What Megatron keeps beside the tensors, by the first rank; returns its problem."""
    if dist.get_rank() != 0:
        return None
    try:
        held = io.BytesIO()
        torch.save(common, held)  # to a full disk torch itself would say no more than "iostream error"
        (folder / COMMON_STATE_FNAME).write_bytes(held.getvalue())
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    except OSError as error:
        return str(error)
    return None


def _write_sharded(
    sharded: dict[str, Any], copies: dict[int, OptimizerCopy], folder: str | Path, group: dist.ProcessGroup | None
) -> None:
    """Megatron's torch_dist format, written by threads of this process with torch's own writer; a failure on one rank
    is raised on all. ``group``: all ranks, for whoever runs beside training.

    Megatron's writer forks, and spawns a manager that runs ``__main__`` again: neither may happen in a process with
    threads whose ``__main__`` is not ours, such as a worker of a cluster runtime. The files are the same.
    """
    moments = {number: copied.gathered() for number, copied in copies.items()}
    gathered, _ = save_preprocess({"optimizer": moments}, validate_access_integrity=False)
    state = {"now": sharded, "gathered": gathered}
    _check_whole(state, group)
    renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(state, keep_only_main_replica=True)
    torch_checkpoint.save(
        mcore_to_pyt_state_dict(renamed, False),
        storage_writer=CountedWriter(folder, thread_count=NUM_WRITER_THREADS, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        process_group=group,
    )


def _check_whole(state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Megatron's check that the ranks have every part of every tensor, once. Raises CheckpointingException on every
    rank."""
    mine = [part.without_data() for part in nested_values(state)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    problem = None
    try:
        validate_sharding_integrity(everyone)  # looks on the first rank alone
    except CheckpointingException as error:
        problem = str(error)
    if problem := parallel.first_problem(problem, group):
        raise CheckpointingException(problem)


def _main_replicas(sharded: dict[str, Any]) -> list[Any]:
    """The parts that this rank writes; the others hold nothing that is needed."""
    renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return [part for parts in renamed.values() for part in parts]


class CountedWriter(torch_checkpoint.FileSystemWriter):
    """torch's writer, which loses what its second thread raises (torch 2.13): a full disk would be a success with parts
    missing. So what was written is counted."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Raises OSError when a part is missing, or with what lies beneath the complaints of torch's file format."""
        try:
            future = super().write_data(plan, planner)
        except RuntimeError as error:
            beneath = error.__context__
            raise OSError(str(beneath if isinstance(beneath, OSError) else error)) from error
        num_written = len(future.wait())
        if num_written != len(plan.items):
            raise OSError(f"only {num_written} of {len(plan.items)} parts were written; is the disk full?")
        return future


def _keyed(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """The chunks under the names that Megatron's optimizers expect; tensors are named by layer, whatever the chunk."""
    single = len(chunks) == 1
    return [("model" if single else f"model{number}", chunk) for number, chunk in enumerate(chunks)]


def _model_state(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    return {key: chunk.sharded_state_dict(metadata=dict(METADATA)) for key, chunk in _keyed(chunks)}


def _to_load(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None) -> dict[str, Any]:
    state = _model_state(chunks)
    if optimizer is None:
        return state
    if torch_adam_checkpoint.uses_torch_adam(optimizer):
        torch_adam_checkpoint.prime(optimizer)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=dict(METADATA))
    return state


def _taken(
    optimizer: MegatronOptimizer, model_state: dict[str, Any], background: Background | None
) -> tuple[dict[Any, Any], dict[int, OptimizerCopy]]:
    """The optimizer in Megatron's format, as its ``sharded_state_dict`` gives it, but for what must be gathered, and
    copies of that."""
    if torch_adam_checkpoint.uses_torch_adam(optimizer):
        torch_adam_checkpoint.prime(optimizer)
    parts = host_copies.each(optimizer)
    if len(parts) > 1:
        optimizer._synchronize_steps()
    memory = HostMemory() if background is None else background.memory
    state, copies = {}, {}
    for number, one in enumerate(parts):
        if not host_copies.is_distributed(one):
            state[number] = one.sharded_state_dict(model_state, False, metadata=dict(METADATA))
            continue
        state[number] = one.state_dict() | {"param_state_sharding_type": host_copies.FORMAT}
        group = one.data_parallel_group_gloo if background is None else background.gathers(one)
        copies[number] = OptimizerCopy(one, model_state, memory=memory, group=group, name=number)
    return (state[0] if len(parts) == 1 else state), copies
