"""What a save takes of this rank: copies in host memory, from which a thread can write while training goes on.

In: the parts of the model and the optimizer. Out: parts that share no memory with them, and of a distributed optimizer,
whose state is cut over the data-parallel ranks without regard to parameters, tensors in the shapes of the parameters,
as Megatron's format "fully_reshardable" has them. Megatron gathers these before it lets go; here the copy comes first
and the gathering is left to the thread, on process groups of its own. Invariant: whoever uses the memory again has
waited for the save before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

FORMAT = "fully_reshardable"
KEYS = ("param", "exp_avg", "exp_avg_sq")


class HostMemory:
    """Memory that each save uses again: to get gigabytes anew, or to pin them, takes longer than to copy them."""

    def __init__(self) -> None:
        self._held: dict[Any, torch.Tensor] = {}

    def take(self, name: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this name, with whatever is in it; pinned where there is a GPU."""
        held = self._held.get(name)
        if held is None or held.shape != torch.Size(shape) or held.dtype != dtype:
            held = torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available())
            self._held[name] = held
        return held


class Background:
    """What saves in the background need and nobody else uses: process groups, and host memory. A collective to make."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self.memory = HostMemory()
        self.group = dist.new_group(backend="gloo")
        mine = [_ranks(one) for one in each(optimizer) if is_distributed(one)]
        everyone: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine, group=self.group)
        self._groups = {
            ranks: dist.new_group(list(ranks), backend="gloo")
            for ranks in sorted({ranks for those in everyone for ranks in those})
        }

    def gathers(self, optimizer: DistributedOptimizer) -> dist.ProcessGroup:
        """The ranks over which the state of this optimizer is cut."""
        return self._groups[_ranks(optimizer)]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A parameter: what the format says of it, and where in the optimizer's buffer it lies."""

    like: ShardedTensor | ShardedTensorFactory
    shape: torch.Size
    buffer: int
    start: int
    end: int


class OptimizerCopy:
    """This rank's part of a distributed optimizer's state, as it was when this was made."""

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        model_state: dict[str, Any],
        *,
        memory: HostMemory,
        group: dist.ProcessGroup,
        name: int,
    ) -> None:
        """``model_state`` is the model in Megatron's format, with the live parameters; the data itself is not kept."""
        self._group = group
        self._buckets = [[(b.offset, b.grad_data.numel()) for b in buffer.buckets] for buffer in optimizer.buffers]
        self._cuts = _cuts(optimizer, model_state)
        self._mine: list[dict[str, torch.Tensor]] = []
        size = group.size()
        for number, ranges in enumerate(optimizer.gbuf_ranges):
            length = sum(numel for _, numel in self._buckets[number]) // size
            mine = {key: memory.take((name, number, key), (length,), torch.float32) for key in KEYS}
            (maps,) = ranges.values()
            for (offset, _), bucket in zip(self._buckets[number], maps, strict=True):
                for parameter, found in bucket["param_map"].items():
                    state = optimizer._get_main_param_and_optimizer_states(parameter)
                    place = slice(offset // size + found["gbuf_local"].start, offset // size + found["gbuf_local"].end)
                    for key in KEYS:
                        mine[key][place].copy_(state[key].detach().view(-1), non_blocking=True)
            self._mine.append(mine)

    def gathered(self) -> dict[int, dict[str, ShardedBase]] | None:
        """The state of every parameter, on the first of the data-parallel ranks; None on others. A collective of
        these."""
        whole = [
            {key: self._whole(number, flat) for key, flat in mine.items()} for number, mine in enumerate(self._mine)
        ]
        if self._group.rank() != 0:
            return None
        return {
            index: {key: _placed(cut, key, whole[cut.buffer][key]) for key in KEYS}
            for index, cut in enumerate(self._cuts)
        }

    def _whole(self, number: int, mine: torch.Tensor) -> torch.Tensor:
        """A buffer of all ranks, padding included; every bucket of it is cut into as many pieces as there are ranks."""
        size = self._group.size()
        if size == 1:
            return mine
        is_first = self._group.rank() == 0
        whole = torch.empty(size * mine.numel() if is_first else 0)
        for offset, numel in self._buckets[number]:
            pieces = list(whole[offset : offset + numel].chunk(size)) if is_first else None
            piece = mine[offset // size : (offset + numel) // size]
            dist.gather(piece, pieces, dst=dist.get_global_rank(self._group, 0), group=self._group)
        return whole


def each(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of a chain (dense parameters, experts)."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def is_distributed(one: MegatronOptimizer) -> bool:
    """Whether its state is cut over the data-parallel ranks; one without parameters has none."""
    return isinstance(one, DistributedOptimizer) and not one.is_stub_optimizer


def copy_parts(parts: Iterable[ShardedBase], memory: HostMemory) -> None:
    """Replace what the parts hold by copies; parts are made anew for each save."""
    for number, part in enumerate(parts):
        if isinstance(part, ShardedTensor):
            held = memory.take(("part", number), part.data.shape, part.data.dtype)
            part.data = held.copy_(part.data.detach(), non_blocking=True)
        else:
            part.data = copy.deepcopy(part.data)


def wait_for_copies() -> None:
    """Return when the device has made them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _ranks(optimizer: DistributedOptimizer) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(optimizer.data_parallel_group))


def _cuts(optimizer: DistributedOptimizer, model_state: dict[str, Any]) -> list[_Cut]:
    """Every parameter in the order of Megatron's buffers, by whose numbers it is found again."""
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    by_parameter = {part.data: part for part in nested_values(sharded)}
    return [
        _Cut(like := by_parameter[parameter], like.data.shape, number, start, end)
        for number, buffer in enumerate(optimizer.buffers)
        for parameter, (start, end, _) in buffer.param_index_map.items()
    ]


def _placed(cut: _Cut, key: str, whole: torch.Tensor) -> ShardedBase:
    data = whole[cut.start : cut.end].reshape(cut.shape)
    changed: dict[str, Any] = {"key": f"optimizer.state.{key}.{cut.like.key}", "data": data}
    if isinstance(cut.like, ShardedTensor):
        changed["dtype"] = data.dtype
    return replace(cut.like, **changed)
