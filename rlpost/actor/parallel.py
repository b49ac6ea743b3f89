"""Process groups of the trainer: torch.distributed and Megatron's parallel state.

In: this rank's place in the world and the layout. Out: initialised groups, and the few of them others need by name.
Tensor-parallel ranks are neighbours: rank = data_parallel_rank * tensor_model_parallel_size + tensor_parallel_rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rlpost.actor import device
from rlpost.errors import PlacementError


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of the trainer meet: rank 0 listens on ``master_addr:master_port``."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int


def initialise(
    rendezvous: Rendezvous, *, tensor_model_parallel_size: int, distributed_timeout_minutes: int, seed: int
) -> None:
    """Join the other ranks. Blocks until all have come or the timeout passes (torch's DistStoreError).

    Raises PlacementError when the tensor-parallel size does not divide the number of ranks.
    """
    if rendezvous.world_size % tensor_model_parallel_size:
        raise PlacementError(
            f"tensor_model_parallel_size={tensor_model_parallel_size} does not divide the {rendezvous.world_size} "
            "ranks of the trainer; choose one that does"
        )
    dist.init_process_group(
        device.backend(),
        init_method=f"tcp://{_host(rendezvous.master_addr)}:{rendezvous.master_port}",
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timedelta(minutes=distributed_timeout_minutes),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        distributed_timeout_minutes=distributed_timeout_minutes,
    )
    device.seed(seed)
    model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Leave all groups; harmless when none was joined."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def tensor_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold one copy of the model together."""
    return parallel_state.get_tensor_model_parallel_group()


def data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same shard of the model."""
    return parallel_state.get_data_parallel_group()


def data_parallel_rank() -> int:
    """Which part of a batch is this rank's."""
    return parallel_state.get_data_parallel_rank()


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
