"""Determine which elements of model and optimizer this rank writes, and which it reads.

Input: the model in Megatron's sharded form, its optimizer. Output: shards. Invariant: over all
ranks every element of every tensor is written once (torch's planner checks that at each save): a
tensor that several ranks hold is written by those whose replica it is, data-parallel replicas share
a large one, and a state that a distributed optimizer shards is written by the ranks over which it
is sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlpost.trainer.torch_dist import optimizer_state
from rlpost.trainer.torch_dist.optimizer_state import ParameterState
from rlpost.trainer.torch_dist.shards import Region, Shard, regions_of, share_of

OPTIMIZER_PREFIX = "optimizer.state."
SHARED_FROM = 1024**2
"""Number of elements from which each data-parallel replica of a weight writes a part of it."""
EXPERTS = ".experts."

Regions = dict[torch.Tensor, tuple[Region, ...]]
"""The regions of every tensor of the model."""


def regions_of_model(model_state: dict[str, object]) -> Regions:
    """Map the elements of every tensor of the model to tensors of the checkpoint."""
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {part.data: regions_of(part) for part in nested_values(sharded)}


def written_weights(regions: Regions) -> list[Shard]:
    """Return what this rank writes of the model.

    Parameters are read later. Buffers are copied now, because a forward pass may change them (such
    as the bias of a router).
    """
    shards = []
    for tensor, found in regions.items():
        start, end = _written_range(tensor, found[0])
        if start < end:
            if not isinstance(tensor, torch.nn.Parameter):
                tensor = tensor.detach().clone()
            shards.append(Shard("", found, start, end, tensor.dtype, _flat(tensor)))
    return shards


def _written_range(tensor: torch.Tensor, region: Region) -> tuple[int, int]:
    """Return which elements this rank writes of a tensor that data-parallel ranks also hold.

    Each of them writes a share of a large tensor.
    """
    *elsewhere, replica = region.replica_id
    if any(elsewhere):  # a tensor-parallel neighbour, or another pipeline stage, writes it
        return 0, 0
    if tensor.numel() < SHARED_FROM:
        return (0, tensor.numel()) if replica == 0 else (0, 0)
    if EXPERTS in region.key:
        count = parallel_state.get_expert_data_parallel_world_size()
    else:
        count = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return share_of(tensor.numel(), region.row, replica, count)


def _flat(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor.detach().view(-1)


def state_shards(
    state: ParameterState, regions: tuple[Region, ...], part: tuple[int, int]
) -> list[Shard]:
    """Some elements of the main weight and of each moment, in the order of ``state.keys``."""
    start, end = part
    if start >= end:
        return []
    return [
        Shard(
            f"{OPTIMIZER_PREFIX}{name}.",
            regions,
            start,
            end,
            torch.float32,
            lambda name=name: state.tensors()[name],  # type: ignore[misc]
            origin=state.start,
        )
        for name in state.keys
    ]


def states_of(
    optimizer: MegatronOptimizer, regions: Regions, written: set[torch.Tensor]
) -> list[Shard]:
    """Return what this rank writes of the optimizer.

    ``written``: the parameters, of any shape, that ``written_states`` returned.
    """
    shards: list[Shard] = []
    for state in optimizer_state.parameter_states(optimizer):
        found = regions[state.parameter]
        if not state.is_sharded:
            shards += state_shards(state, found, _written_range(state.parameter, found[0]))
        elif state.parameter in written:
            shards += state_shards(state, found, (state.start, state.end))
    return shards


def written_states(optimizer: MegatronOptimizer | None, regions: Regions) -> set[torch.Tensor]:
    """The parameters whose optimizer state this rank writes. A collective of data-parallel ranks.

    The ranks over which a state is sharded write it together if one of them holds the parameter's
    main replica. A copy elsewhere (of a norm on another tensor-parallel rank, of tied embeddings on
    the last stage) is not written.
    """
    if optimizer is None:
        return set()
    main = {tensor: not any(shards[0].replica_id) for tensor, shards in regions.items()}
    written = {tensor for tensor, is_main in main.items() if is_main}
    for one in optimizer_state.inner(optimizer):
        if not isinstance(one, DistributedOptimizer):
            continue
        group = one.data_parallel_group_gloo
        parameters = [parameter for buffer in one.buffers for parameter in buffer.param_index_map]
        flags: list[list[bool]] = [[]] * group.size()
        dist.all_gather_object(flags, [main[parameter] for parameter in parameters], group=group)
        for parameter, *rank_flags in zip(parameters, *flags, strict=True):
            if any(rank_flags):
                written.add(parameter)
    return written
