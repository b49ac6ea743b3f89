"""Values that control what a rank does next, where tensors have no data.

A step on the meta device computes shapes alone, but some numbers decide which call comes next: the
length of the next micro-batch, the rows that each expert gets, the value of a metric. In the
context of ``given_values`` they come from the plan:

- micro-batches keep their integer columns (starts of sequences, positions of responses) in host
  memory, with data;
- a pipeline stage receives the shapes of the micro-batches in the order of the schedule;
- routers are balanced: the k experts of row t are k t to k t + k - 1, modulo their number, and
  every rank of an expert group has as many rows as this one;
- an image has features of the encoder's shape, which is not called;
- a floating-point number that is read is 1; an integer that is not known is an error with its line.

Attention is one operation that allocates what a fused kernel does: its output, and one float32 for
each row and head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.moe import token_dispatcher
from torch.autograd.function import FunctionCtx

from rlpost.extensions.rehearsal.all_ranks.meta import MetaAsHost
from rlpost.extensions.rehearsal.all_ranks.recorder import check_floating
from rlpost.trainer import attention, device
from rlpost.trainer.packing import PackedMicroBatch
from rlpost.trainer.vision.images import Images
from rlpost.types import ImageSpan

P2P = p2p_communication.P2PCommunicator
DISPATCHER = token_dispatcher.MoEAlltoAllTokenDispatcher


class Given(MetaAsHost):
    """Answers reads of tensors without data.

    A subclass, because each further mode costs time for every operation.
    """

    answered = MetaAsHost.answered | {
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.to,
        torch.tensor,
    }

    def __init__(self) -> None:
        super().__init__()
        self.shapes: deque[list[int]] = deque()
        """Shapes that are read next, of tensors from other pipeline stages."""

    def answer(
        self, function: Callable[..., object], args: tuple[Any, ...], options: dict[str, Any]
    ) -> object:
        """Call ``function``, or answer for it."""
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if function is torch.Tensor.tolist:
                return self._listed(args[0])
            if function is torch.Tensor.numpy:
                check_floating(args[0])
                return torch.ones(args[0].shape, dtype=args[0].dtype, device="cpu").numpy()
            if function is torch.Tensor.to and _goes_to_host(args[1:], options):
                check_floating(args[0])
                dtype = options.get("dtype") or args[0].dtype
                return torch.ones(args[0].shape, dtype=dtype, device="cpu")
        if function is torch.tensor and isinstance(args[0], list | tuple):
            # It reads its tensors without an operation that a dispatch mode sees.
            return function(_known(args[0]), *args[1:], **options)
        return super().answer(function, args, options)

    def _listed(self, tensor: torch.Tensor) -> object:
        if not tensor.is_floating_point() and self.shapes:
            return self.shapes.popleft()
        check_floating(tensor)
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu").tolist()


def _known(value: object) -> object:
    """Nested lists with 1 in place of floating-point numbers without data."""
    if isinstance(value, list | tuple):
        return [_known(one) for one in value]
    if isinstance(value, torch.Tensor) and value.is_meta and value.is_floating_point():
        return 1.0
    return value


def _goes_to_host(args: Sequence[object], options: dict[str, Any]) -> bool:
    wanted = options.get("device", args[0] if args else None)
    return isinstance(wanted, str | torch.device) and torch.device(wanted).type == "cpu"


class Schedule:
    """The order in which a pipeline stage receives micro-batches, in both directions."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._forward: deque[list[int]] = deque()
        self._backward: deque[list[int]] = deque()

    def begin(
        self,
        shapes: Sequence[list[int]],
        *,
        num_chunks: int,
        group_size: int,
        is_first_stage: bool,
        is_last_stage: bool,
    ) -> None:
        """Start a pass.

        Args:
            shapes: of the activations between stages, for each micro-batch.
            num_chunks: virtual stages of this rank.
            group_size: micro-batches that a chunk processes in a row.
            is_first_stage: the stage receives no input for its first chunk.
            is_last_stage: it receives no gradient for its last one.
        """
        if num_chunks == 1:
            forward = backward = list(range(len(shapes)))
        else:
            table = get_schedule_table(len(shapes), num_chunks, group_size)
            forward = [micro for micro, chunk in table if chunk or not is_first_stage]
            backward = [micro for micro, chunk in table if chunk or not is_last_stage]
        self._forward = deque(shapes[index] for index in forward)
        self._backward = deque(shapes[index] for index in backward)

    def expect(self, recv_prev: bool, recv_next: bool) -> None:
        """Queue the shapes that are read after the next exchange."""
        for wanted, queue in ((recv_prev, self._forward), (recv_next, self._backward)):
            if wanted:
                if not queue:
                    raise RuntimeError(
                        "a pipeline stage receives more often than the schedule says"
                    )
                self._given.shapes.append(queue.popleft())


class BalancedMap:
    """A routing map of which only the counts are known: what the dispatcher reads of one."""

    def __init__(self, rows: int, *, topk: int, num_experts: int) -> None:
        self._rows, self._topk, self._num_experts = rows, topk, num_experts

    def size(self, dim: int) -> int:
        """Rows for dimension 0."""
        return (self._rows, self._num_experts)[dim]

    def sum(self, dim: int) -> torch.Tensor:
        """Rows of each expert, with data."""
        assert dim == 0
        whole, rest = divmod(self._rows * self._topk, self._num_experts)
        counts = [whole + (expert < rest) for expert in range(self._num_experts)]
        return torch.tensor(counts, device="cpu")


@contextmanager
def given_values() -> Iterator[Schedule]:
    """Context in which the values come from the plan."""
    mode = Given()
    schedule = Schedule(mode)
    with ExitStack() as stack:
        stack.enter_context(patch.object(P2P, "_communicate_shapes", _shapes_from(schedule)))
        stack.enter_context(patch.object(DISPATCHER, "preprocess", _balanced()))
        stack.enter_context(
            patch.object(token_dispatcher, "gather_from_sequence_parallel_region", _gathered())
        )
        stack.enter_context(patch.object(dist, "batch_isend_irecv", _one_by_one))
        stack.enter_context(patch.object(PackedMicroBatch, "on_device", _with_integers_on_host))
        stack.enter_context(patch.object(Images, "_features_of", _features_of))
        stack.enter_context(patch.object(Images, "_encoded", _features_of))
        stack.enter_context(patch.object(attention, "attend", _fused_attention))
        stack.enter_context(patch.object(attention, "attend_windowed", _fused_windowed))
        stack.enter_context(mode)
        yield schedule


def _shapes_from(schedule: Schedule) -> Callable[..., object]:
    original = P2P._communicate_shapes

    def communicate(
        self: object, send_next: object, send_prev: object, recv_prev: bool, recv_next: bool
    ) -> object:
        schedule.expect(recv_prev, recv_next)
        return original(self, send_next, send_prev, recv_prev, recv_next)

    return communicate


def _one_by_one(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Issue a batch of transfers; torch looks for the backend of meta tensors, which has none."""
    return [
        one.op(one.tensor, group=one.group, tag=one.tag, **{_peer_of(one): one.group_peer})
        for one in operations
    ]


def _peer_of(operation: dist.P2POp) -> str:
    return "group_dst" if operation.op is dist.isend else "group_src"


def _balanced() -> Callable[..., torch.Tensor]:
    original = DISPATCHER.preprocess

    def preprocess(
        self: token_dispatcher.MoEAlltoAllTokenDispatcher, routing_map: torch.Tensor
    ) -> torch.Tensor:
        rows, num_experts = routing_map.shape
        known = BalancedMap(rows, topk=self.config.moe_router_topk, num_experts=num_experts)
        return original(self, known)

    return preprocess


def _gathered() -> Callable[..., torch.Tensor]:
    """Gather counts in host memory, which are equal on all ranks, on the device as on a GPU."""
    original = token_dispatcher.gather_from_sequence_parallel_region

    def gather(values: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        if values.is_meta:
            return original(values, *args, **options)
        original(values.to("meta"), *args, **options)
        group: dist.ProcessGroup = options["group"]
        return values.repeat(group.size())

    return gather


def _with_integers_on_host(self: PackedMicroBatch) -> PackedMicroBatch:
    values = {field.name: getattr(self, field.name) for field in fields(self)}
    moved = {
        name: device.on_device(value)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return PackedMicroBatch(**(values | moved))


def _features_of(self: Images, image: ImageSpan) -> torch.Tensor:
    """The features of an image that does not exist; the encoder has no collectives.

    Without a graph: the gradients of a trained encoder are zeros, of their shapes and memory.
    """
    none = self.tower.no_features()
    return none.new_empty(image.num_tokens, *none.shape[1:])


class _FusedAttention(torch.autograd.Function):
    """Shapes and memory of a fused kernel: it saves its inputs, its output and a sum per row."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        output = query.new_empty(*query.shape[:-1], value.size(-1))
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, sums, sinks)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, _, sinks = ctx.saved_tensors
        return tuple(
            None if one is None else torch.empty_like(one) for one in (query, key, value, sinks)
        )


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: object, *, scale: float
) -> torch.Tensor:
    return _fused_windowed(query, key, value, bounds, scale=scale, window=None, sinks=None)


def _fused_windowed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: object,
    *,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    found = _FusedAttention.apply(query, key, value, sinks)
    assert isinstance(found, torch.Tensor)
    return found
