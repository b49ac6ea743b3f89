"""Record the calls of one rank to torch.distributed, and the bytes that its tensors take.

Input: a rank that runs in the context, with any backend. Output: its calls in order, and the
largest number of bytes in each phase. A dispatch mode sees every operation of torch, those of the
backward pass included, so no caller has to be changed. With fake groups nothing is transferred;
with gloo the calls go through, which is how a rehearsal is compared with a real run.

Collectives of objects are recorded as one call, without the transfers that they consist of.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlpost.extensions.rehearsal.all_ranks.distributed_calls import (
    RECEIVE,
    SEND,
    SPLIT,
    Call,
    OffloadCycle,
    Recording,
)
from rlpost.extensions.rehearsal.all_ranks.meta import MetaResults

KINDS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "broadcast_": "broadcast",
    "reduce_": "reduce", "allgather_": "all_gather", "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "gather_": "gather",
    "scatter_": "scatter", "alltoall_base_": SPLIT, "alltoall_": SPLIT, "send": SEND,
    "recv_": RECEIVE, "recv_any_source_": RECEIVE, "barrier": "barrier",
}  # fmt: skip
"""Our name of each operation of c10d."""
COUNTED_ARGUMENT = {"allgather_": 1, "_allgather_base_": 1, "allgather_into_tensor_coalesced_": 1}
"""The argument whose tensors all members have alike; the first for the others."""
OBJECT_CALLS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)
HERE = str(Path(__file__).parent)
PROJECT = Path(__file__).parents[4]
NOT_OURS = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"] + "/")


class CallRecorder(TorchDispatchMode):
    """The calls and bytes of one rank, while it is entered."""

    def __init__(
        self, *, transfers: bool, results: MetaResults | None = None, topk: int | None = None
    ) -> None:
        """Create a recorder; its context is ``recording``.

        Args:
            transfers: whether the groups are real. Otherwise collectives return at once and their
                results keep the previous content of their memory.
            results: of operations of earlier ranks; None where every operation is dispatched.
            topk: experts of a row, which a routing mask without data selects; None if not known.
        """
        super().__init__()
        self.calls: list[Call] = []
        self.peaks: dict[str, int] = {}
        self.phase = ""
        self._transfers = transfers
        self._results = results
        self._topk = topk
        self._bytes = 0
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._is_silent = False
        self._operation = ""

    def measure_again(self) -> None:
        """Count the storages that were resized since they were made."""
        for key, (reference, size) in list(self._storages.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._storages[key] = (reference, storage.nbytes())
                self._bytes += storage.nbytes() - size

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context of one phase; calls and peaks count to it."""
        before, self.phase = self.phase, phase
        self.peaks[phase] = max(self._bytes, self.peaks.get(phase, 0))
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def recording(self) -> Iterator[CallRecorder]:
        """Context that records, with the collectives of objects as one call each."""
        with ExitStack() as stack:
            for name in OBJECT_CALLS:
                stack.enter_context(patch.object(dist, name, self._of_objects(name)))
            stack.enter_context(patch.object(dist, "all_reduce", self._with_operation()))
            stack.enter_context(self)
            yield self

    def recorded(
        self, rank: int, held: dict[str, int], offload: OffloadCycle | None = None
    ) -> Recording:
        """Return the recording so far."""
        return Recording(rank, tuple(self.calls), dict(self.peaks), held, offload)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, options)
        if func is torch.ops.aten.masked_select.default and args[0].is_meta:
            return self._selected(args[0], args[1])
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            check_floating(args[0])
            return 1.0
        if self._transfers:
            outputs = func(*args, **options)
        elif func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # without data there is nothing to copy to host memory
        else:
            with torch._C.DisableTorchFunction():
                outputs = self._made(func, args, options)
        for tensor in _leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return outputs

    def _made(
        self, func: OpOverload, args: tuple[object, ...], options: dict[str, object]
    ) -> object:
        if self._results is None:
            return _on_one_device(func, args, options)
        return self._results.of(func, args, options, _on_one_device)

    def _selected(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._topk is None:
            raise RuntimeError(f"{_line()}: how many elements a mask selects is not known on meta")
        size = mask.shape[-1] * self._topk
        made = torch.empty(size, dtype=values.dtype, device=values.device)
        self._count(made)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu" and not self._transfers:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # the address of the storage, which views of a tensor share
        if key in self._storages:
            return
        size = storage.nbytes()

        def forget(_: object) -> None:
            if (entry := self._storages.pop(key, None)) is not None:
                self._bytes -= entry[1]

        self._storages[key] = (weakref.ref(storage, forget), size)
        self._bytes += size
        if self._bytes > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self._bytes

    def _collective(
        self, func: OpOverload, args: tuple[object, ...], options: dict[str, object]
    ) -> object:
        name = func._schema.name.partition("::")[2]
        if name not in KINDS:
            raise RuntimeError(f"{_line()}: c10d.{name} is not recorded yet")
        group = next(one for one in map(_group, args) if one is not None)
        if not self._is_silent:
            self.calls.append(self._call(name, args, group))
        if self._transfers:
            return func(*args, **options)
        work = torch._C._distributed_c10d.FakeWork().boxed()
        returns_tensors = len(func._schema.returns) > 1
        return (args[0], work) if returns_tensors else work

    def _call(self, name: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> Call:
        kind = KINDS[name]
        ranks = tuple(dist.get_process_group_ranks(group))
        tensors = [
            one
            for one in tree_leaves(args[COUNTED_ARGUMENT.get(name, 0)])
            if isinstance(one, torch.Tensor)
        ]
        numbers = [one for one in args if type(one) is int]
        root: int | None = None
        sent: tuple[int, ...] = ()
        received: tuple[int, ...] = ()
        sizes = tuple(one.numel() for one in tensors)
        if kind in (SEND, RECEIVE) or name in ("broadcast_", "reduce_", "gather_", "scatter_"):
            root = numbers[0]
        if kind == SPLIT:
            sizes, sent, received = _splits(name, args, len(ranks))
        if kind == "barrier":
            sizes = ()
        return Call(
            kind=kind,
            group=ranks,
            sizes=sizes,
            dtype=str(tensors[0].dtype).removeprefix("torch.") if sizes else "",
            phase=self.phase,
            line=_line(),
            root=root,
            sent=sent,
            received=received,
            operation=self._operation,
        )

    def _with_operation(self) -> Callable[..., object]:
        """``all_reduce`` that notes its operation, which an operation of c10d does not show."""
        original = dist.all_reduce

        def call(tensor: torch.Tensor, *args: object, **options: object) -> object:
            operation = options.get("op", args[0] if args else dist.ReduceOp.SUM)
            self._operation = str(operation).rpartition(".")[2]
            try:
                return original(tensor, *args, **options)
            finally:
                self._operation = ""

        return call

    def _of_objects(self, name: str) -> Callable[..., object]:
        original = getattr(dist, name)

        def call(first: list[object], *args: object, **options: object) -> object:
            group = options.get("group") or next(
                (one for one in args if isinstance(one, dist.ProcessGroup)), dist.group.WORLD
            )
            ranks = tuple(dist.get_process_group_ranks(group))
            if not self._is_silent:
                self.calls.append(Call(name, ranks, (), "", self.phase, _line()))
            if not self._transfers:
                # the objects of this rank for every rank: they agree, or a plan replaces them
                if name == "all_gather_object":
                    first[:] = [args[0]] * len(first)
                return None
            before, self._is_silent = self._is_silent, True
            try:
                return original(first, *args, **options)
            finally:
                self._is_silent = before

        return call


def _group(value: object) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(value)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        return None


def _splits(
    name: str, args: tuple[Any, ...], size: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Elements of a row, rows for each member, rows from each member."""
    if name == "alltoall_":
        sent, received = (tuple(one.numel() for one in args[at]) for at in (1, 0))
        return (1,), sent, received
    output, given = args[0], args[1]
    row = math.prod(given.shape[1:])
    received, sent = (
        tuple(splits) or (len(tensor) // size,) * size
        for splits, tensor in ((args[3], output), (args[4], given))
    )
    return (row,), sent, received


def check_floating(tensor: torch.Tensor) -> None:
    """Raise RuntimeError if ``tensor``, which has no data, may decide what comes next."""
    if not tensor.is_floating_point():
        raise RuntimeError(
            f"{_line()}: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is read, and a rehearsal has "
            "no value for it"
        )


def _on_one_device(
    func: OpOverload, args: tuple[object, ...], options: dict[str, object]
) -> object:
    """Compute an operation; if it also has tensors on meta, those of the host are moved there.

    A scalar may stay, as on a GPU. Copies between devices are left alone.
    """
    if func not in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
        devices = {one.is_meta for one in _leaves(args) if isinstance(one, torch.Tensor)}
        if len(devices) > 1:
            args = tuple(torch.utils._pytree.tree_map(_to_meta, one) for one in args)
    return func(*args, **options)


def _leaves(value: object) -> Iterator[object]:
    """Leaves of nested lists and tuples; torch's own walk takes ten times as long."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _to_meta(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim():
        if value.dtype == torch.bool:
            return value.to("meta")
        return torch.empty_like(value, device="meta")
    return value


def _line() -> str:
    """Return the innermost line outside of torch and the rehearsal, and its caller in rlpost."""
    frame = sys._getframe(1)
    innermost = ""
    while frame is not None:
        file = _file(frame.f_code.co_filename)
        if file.name:
            where = f"{file.name}:{frame.f_lineno}"
            if not innermost:
                innermost = where
            if file.is_of_rlpost:
                return innermost if where == innermost else f"{innermost} (from {where})"
        frame = frame.f_back  # type: ignore[assignment]
    return innermost


@dataclass(frozen=True, slots=True)
class _SourceFile:
    """A source file; without a name it is torch's or the rehearsal's."""

    name: str
    is_of_rlpost: bool


@cache
def _file(path: str) -> _SourceFile:
    name = _short(path) if _is_ours(path) else ""
    return _SourceFile(name, path.startswith(str(PROJECT / "rlpost")))


def _is_ours(path: str) -> bool:
    """Whether a file is of Megatron, of rlpost without the rehearsal, or of the user."""
    if "/site-packages/" in path:
        return "/site-packages/megatron/" in path
    return not path.startswith((*NOT_OURS, HERE, "<"))


def _short(path: str) -> str:
    for marker in ("/site-packages/", f"{PROJECT}/"):
        _, found, rest = path.partition(marker)
        if found:
            return rest
    return path
