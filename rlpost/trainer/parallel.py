"""Process groups of the trainer: torch.distributed and Megatron's parallel state.

Input: this rank, the world size and the layout. Output: initialised groups, and accessors of those
that other modules need. Rank order is tensor-parallel first, then context, data and pipeline:
tensor-parallel ranks are adjacent, pipeline stages are far apart. Experts are sharded over the
ranks of one pipeline stage: expert-tensor first, then expert, then data.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from common.torch_store import close_store, join_ranks, open_store
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, PlacementError
from rlpost.trainer import device
from rlpost.trainer.weights.inventory import Groups

T = TypeVar("T")
_stores: list[dist.Store] = []  # torch does not keep the Python object of the store that it uses
_timeouts: list[timedelta] = []  # of the groups; torch has no public way to read it

tensor_parallel_group = parallel_state.get_tensor_model_parallel_group
"""Returns the ranks over which single tensors are sharded."""
context_parallel_group = parallel_state.get_context_parallel_group
"""Returns the ranks over which sequences are sharded."""
pipeline_group = parallel_state.get_pipeline_model_parallel_group
"""Returns the ranks over which layers are distributed."""
data_parallel_group = parallel_state.get_data_parallel_group
"""Returns the ranks with the same weights and other samples.

With ``with_context_parallel`` also those with other parts of the same samples.
"""
data_parallel_rank = parallel_state.get_data_parallel_rank
"""Returns the index of this rank's part of a batch."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Rendezvous of the trainer's ranks: rank 0 listens on ``master_addr:master_port``.

    Only those who know ``secret`` can join; a single rank needs none.
    """

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    secret: str = ""


def initialise(rendezvous: Rendezvous, config: Config, *, num_virtual_stages: int | None) -> None:
    """Join the process groups. Blocks until all ranks have joined.

    Raises:
        PlacementError: the layout does not fit the number of ranks.
        ValueError: several ranks have no secret.
        torch.distributed.DistError: a rank did not join within the timeout.
    """
    check_layout(config, rendezvous.world_size)
    timeout = timedelta(minutes=config.cluster.distributed_timeout_minutes)
    store = open_store(
        rendezvous.master_addr,
        rendezvous.master_port,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        secret=rendezvous.secret,
        timeout=timeout,
    )
    join_ranks(store, rendezvous.rank, rendezvous.world_size)
    _stores.append(store)
    dist.init_process_group(
        device.backend(),
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )
    form_groups(config, num_virtual_stages=num_virtual_stages)


def form_groups(config: Config, *, num_virtual_stages: int | None) -> None:
    """Create Megatron's groups and seed the random generators.

    Collective; requires torch's world group.
    """
    perf = config.perf
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=perf.tensor_model_parallel_size,
        pipeline_model_parallel_size=perf.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=num_virtual_stages,
        context_parallel_size=perf.context_parallel_size,
        expert_model_parallel_size=perf.expert_model_parallel_size,
        expert_tensor_parallel_size=perf.expert_tensor_parallel_size,
        distributed_timeout_minutes=config.cluster.distributed_timeout_minutes,
    )
    _timeouts[:] = [timedelta(minutes=config.cluster.distributed_timeout_minutes)]
    device.seed(config.optimizer.seed)
    model_parallel_cuda_manual_seed(config.optimizer.seed)


def check_layout(config: Config, world_size: int) -> None:
    """Raise PlacementError if the parallel sizes do not divide the number of ranks."""
    perf = config.perf
    sizes = {
        "--tensor-model-parallel-size": perf.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": perf.pipeline_model_parallel_size,
        "--context-parallel-size": perf.context_parallel_size,
    }
    left = world_size
    for flag, size in sizes.items():
        if left % size:
            taken = f", of which other sizes leave {left}" if left != world_size else ""
            raise PlacementError(
                f"{flag} {size} does not divide the {world_size} ranks of the trainer{taken}; use a divisor"
            )
        left //= size
    expert = perf.expert_model_parallel_size
    expert_tensor = perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size
    ranks = world_size // perf.pipeline_model_parallel_size
    if ranks % (expert_tensor * expert):
        raise PlacementError(
            f"--expert-model-parallel-size {expert} x --expert-tensor-parallel-size {expert_tensor} does not divide "
            f"the {ranks} ranks of a pipeline stage; use sizes whose product does"
        )


def destroy() -> None:
    """Destroy all groups, if there are any."""
    # Megatron-core keeps the last tables by their modules, and these keep their groups' sockets.
    for rotary in (RotaryEmbedding, YarnRotaryEmbedding):
        rotary.forward.cache_clear()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    while _stores:
        close_store(_stores.pop())


class Communicators:
    """NCCL's buffers on this rank's GPU, released between ``suspend`` and ``resume``.

    Both are collective in every group that has communicated, because NCCL exchanges handles of the
    new buffers. Groups are visited in the order of their creation, which is equal on all ranks.
    NCCL keeps what it must: buffers that a NIC has registered, and those of NVLink SHARP
    (``ncclMemPersist`` in src/transport/net.cc and nvls.cc of NCCL 2.29.7).
    """

    def __init__(self) -> None:
        self._suspended: list[dist.Backend] = []
        self.num_bytes = 0
        """Bytes that ``resume`` allocates."""

    def suspend(self) -> int:
        """Release the buffers; return their bytes. Call ``resume`` before the next collective.

        The device must be idle. It does nothing when they are released already.

        Raises:
            ConfigError: NCCL cannot do so.
        """
        if self._suspended:
            return 0
        try:
            for backend in _nccl_backends():
                if (num_bytes := _releasable_bytes(backend)) is not None:
                    backend.suspend()
                    self._suspended.append(backend)
                    self.num_bytes += num_bytes
        except RuntimeError as error:
            raise ConfigError(
                "--offload-nccl true: NCCL does not release the buffers of its communicators, which "
                f"needs NCCL 2.29.7 or newer; leave the flag out: {error}"
            ) from error
        return self.num_bytes

    def resume(self) -> None:
        """Allocate the buffers again; does nothing unless they are released."""
        suspended, self._suspended, self.num_bytes = self._suspended, [], 0
        for backend in suspended:
            backend.resume()


def _nccl_backends() -> list[dist.Backend]:
    """Return the NCCL backends of this rank's groups of several ranks, oldest first."""
    groups = dist.distributed_c10d._world.pg_map.items()
    return [
        group._get_backend(torch.device("cuda"))
        for group, (name, _) in groups
        if name == "nccl" and group.size() > 1
    ]


def _releasable_bytes(backend: dist.Backend) -> int | None:
    """Return the bytes that ``suspend`` releases; None before the group's first collective.

    Raises RuntimeError where NCCL is too old.
    """
    try:
        return int(backend.memory_stats()["suspend"])
    except RuntimeError as error:
        if "not initialized" in str(error):
            return None
        raise


def smallest(value: int | None) -> int | None:
    """Return the smallest value of all ranks, or None if a rank has none. Collective."""
    found: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    known = [each for each in found if each is not None]
    return min(known) if len(known) == len(found) else None


def weight_groups() -> Groups:
    """Return the groups over which weights are sharded."""
    return Groups(
        tensor=tensor_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        pipeline=pipeline_group(),
        timeout=_timeouts[0],
    )


def holds_first_copy() -> bool:
    """Return whether this rank is in the same model replica as rank 0.

    With expert parallelism one replica may span all ranks.
    """
    return (
        weight_groups().expert.size() > 1
        or data_parallel_group(with_context_parallel=True).rank() == 0
    )


def is_source_of_stage() -> bool:
    """Return whether this rank sends the weights of its pipeline stage to the engines."""
    return (
        tensor_parallel_group().rank() == 0
        and data_parallel_group(with_context_parallel=True).rank() == 0
    )
