"""Sync, the trainer's half: full weights in flat buckets, on their way to the engines.

In: the exporter of this rank. Out: the buckets, one after another, by one of two ways; the engines are told what comes
over HTTP by somebody else (``rlpost.rollout.engine_side_weights``).

- ``Broadcast``: engines on other GPUs. Each pipeline stage has a process group of its own with all engine ranks: its
  source (rank 0) and every engine rank (from 1 on). Both sides block on each other.
- ``Sharing``: engines on the trainer's own GPUs. Each rank lays the bucket into a piece of memory and hands out one
  handle to it (CUDA IPC; shared memory on a CPU): nothing travels.

Both gather the next bucket while the engines load this one.

The bytes of a bucket are its tensors, each flattened, one after another: SGLang's load format "flattened_bucket". Those
with larger elements come first, because SGLang views the bytes in place and torch wants them aligned for that.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from rlpost.errors import SyncError
from rlpost.types import Bucket
from rlpost.weights.bucket_plan import bucket_bytes
from rlpost.weights.engine_group import EngineGroup
from rlpost.weights.exporter import Exporter, describe, travelling_bytes
from rlpost.weights.flat import as_bytes, num_bytes
from rlpost.weights.quantise import BlockFp8

_DEVICE = 6  # place of storage_device among the arguments of torch's rebuild_cuda_tensor


class Buckets:
    """The weights of the trainer in buckets, as the engines want them: the same plan on every rank."""

    def __init__(
        self,
        exporter: Exporter,
        *,
        limit: int,
        num_engines: int = 1,
        device_bytes: int | None = None,
        quantisation: BlockFp8 | None = None,
    ) -> None:
        """Args: ``limit`` bounds a bucket, unless one weight alone is larger; how large it is within that bound is
        decided by ``bucket_bytes``, and ``device_bytes`` must be the same on every rank; without ``quantisation``
        weights travel in the trainer's precision."""
        self.exporter = exporter
        self.quantisation = quantisation
        total = sum(travelling_bytes(entry, quantisation) for entry in exporter.inventory.entries)
        size = bucket_bytes(total, limit=limit, num_engines=num_engines, device_bytes=device_bytes)
        self.entries = exporter.plan(size, quantisation=quantisation)
        self._plan = tuple(describe(bucket, quantisation) for bucket in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def plan(self) -> tuple[Bucket, ...]:
        """Names, shapes and dtypes of each bucket."""
        return self._plan

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self.exporter.inventory.groups.pipeline.rank()

    def stage_of(self, index: int) -> int:
        """The pipeline stage that holds a bucket's weights."""
        return self.entries[index][0].owner

    def gather(self, index: int, *, on_all_stages: bool) -> dict[str, torch.Tensor]:
        """Full tensors of a bucket, in the order of the plan. A collective of all stages, or of the bucket's own."""
        tensors = self.exporter.gather(self.entries[index], on_all_stages=on_all_stages, quantisation=self.quantisation)
        return {name: tensors[name] for name in self._plan[index].names}

    def take_part(self, index: int) -> None:
        """Gather a bucket within its own stage for another rank: the same collective, of which nothing is kept."""
        self.exporter.gather(self.entries[index], on_all_stages=False, quantisation=self.quantisation, wanted=False)

    def largest_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max(sum(_sizes(bucket)) for bucket in self._plan)


class Broadcast:
    """Sends buckets to engines elsewhere. All but ``abort`` is collective: call on every rank, in order."""

    def __init__(self, buckets: Buckets, *, gathers: bool, is_source: bool, backend: str, timeout_s: float) -> None:
        """Args: ``gathers``: whether this rank and the source of its stage hold parts of the same copy of the model;
        ``is_source``: whether it is that source; ``timeout_s``: the deadline of connecting and of each broadcast."""
        self.buckets = buckets
        self.stage = buckets.stage
        self.gathers = gathers
        self.is_source = is_source
        self.backend = backend
        self.timeout = timedelta(seconds=timeout_s)
        self.group: EngineGroup | None = None
        self.memory = FlatMemory()
        self.gathered: torch.Tensor | None = None
        """Of the bucket that is sent next, on its source."""

    def connect(self, master_addr: str, master_port: int, num_engine_ranks: int, group_name: str) -> None:
        """Form the group of this rank's stage with the engines; its source listens on the address, others do nothing.

        Raises SyncError when the engines have not come within the timeout.
        """
        if not self.is_source:
            return
        if self.group is not None:
            raise SyncError(f"a group with engines exists already; disconnect before connecting {group_name!r}")
        self.group = EngineGroup.form(
            (master_addr, master_port),
            name=group_name,
            num_engine_ranks=num_engine_ranks,
            backend=self.backend,
            timeout=self.timeout,
        )

    def send(self, index: int) -> None:
        """Broadcast bucket ``index``, then gather the one after it while the engines load this one. Every trainer rank
        calls this, for all buckets in order; the first is gathered here.

        Raises SyncError when an engine does not take part in time, or after ``abort``.
        """
        if index == 0:
            self.gathered = None  # of an update that was broken off
            self._gather(index)
        flat, self.gathered = self.gathered, None
        failure = None
        if flat is not None:
            failure = self._broadcast(index, flat)
            del flat  # before the next one takes memory
        # Also after a failure: the other ranks of the stage do not know of it and gather with this one.
        if index + 1 < len(self.buckets):
            self._gather(index + 1)
        if failure is not None:
            raise failure

    def _gather(self, index: int) -> None:
        """A collective of the ranks that hold the bucket; on the source alone its bytes are kept."""
        if not self.gathers or self.buckets.stage_of(index) != self.stage:
            return
        if self.is_source:
            tensors = self.buckets.gather(index, on_all_stages=False)
            self.gathered = self.memory.filled(tensors.values())
        else:
            self.buckets.take_part(index)

    def _broadcast(self, index: int, flat: torch.Tensor) -> SyncError | None:
        """Send a bucket; returns what went wrong."""
        if self.group is None:
            return SyncError("no engine is connected; call connect before send")
        try:
            self.group.broadcast(flat)
        except SyncError as error:
            self.memory = FlatMemory()  # an operation that was abandoned may still read the old one
            return SyncError(
                f"bucket {index + 1} of {len(self.buckets)} ({flat.numel()} bytes) did not reach all engines: {error}"
            )
        return None

    def abort(self) -> None:
        """Let ``send`` fail soon instead of at its deadline, for an engine failed. Not collective; may be called from
        another thread while ``send`` runs."""
        group = self.group
        if group is not None:
            group.cancel()

    def disconnect(self) -> None:
        """Leave the group, so that another can be formed; harmless when there is none."""
        group, self.group = self.group, None
        if group is not None:
            group.leave()


class Sharing:
    """Lays buckets open to engines on the same device. Collective: call on every rank, in order.

    The memory is two pieces, each as large as the largest bucket, used in turn: the engines load from one while the
    other is filled. An engine has copied a bucket into its model before it answers, so nothing that it still reads is
    overwritten as long as bucket ``index`` is asked for after all answers to ``index - 2``.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.pieces: dict[int, torch.Tensor] = {}

    def share(self, index: int) -> str:
        """Gather bucket ``index`` and return a handle: base64 of what SGLang's update_weights_from_tensor takes with
        the load format "flattened_bucket". Every trainer rank calls this. A handle is good for one reader (torch counts
        references) and until the next but one call."""
        tensors = self.buckets.gather(index, on_all_stages=True)
        size = sum(tensor.nbytes for tensor in tensors.values())
        device = next(iter(tensors.values())).device
        piece = self.pieces.get(index % 2)
        if piece is None or piece.numel() < size:
            piece = self.pieces[index % 2] = _shareable(self.buckets.largest_bytes(), device)
        flat = piece[:size]
        torch.cat([as_bytes(tensor) for tensor in tensors.values()], out=flat)
        if device.type == "cuda":
            torch.cuda.synchronize()  # the engine's stream does not know ours
        buffer = io.BytesIO()
        _HandlePickler(buffer).dump({"flattened_tensor": flat, "metadata": _metadata(tensors)})
        return base64.b64encode(buffer.getvalue()).decode()

    def release(self) -> None:
        """Give the memory back once all engines have answered; harmless without."""
        self.pieces.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def _metadata(tensors: Mapping[str, torch.Tensor]) -> list[SimpleNamespace]:
    """Where each tensor lies in the bytes, as SGLang's FlattenedTensorMetadata says it. SGLang reads attributes of any
    object that its unpickler lets pass, so its package is not needed here."""
    metadata, start = [], 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        place = {"start_idx": start, "end_idx": end, "numel": end - start}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
        start = end
    return metadata


class _HandlePickler(ForkingPickler):
    """Names the GPU of a tensor by its UUID. Its number is that of this process, which sees one GPU; an engine over
    several sees it under another. SGLang's side reads either (sglang/srt/utils/patch_torch.py; pytorch issue 149196).
    """

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        return rebuild, with_uuid(arguments, lambda number: str(torch.cuda.get_device_properties(number).uuid))


def with_uuid(arguments: tuple[Any, ...], uuid_of: Callable[[int], str]) -> tuple[Any, ...]:
    """The arguments of torch's ``rebuild_cuda_tensor`` with the device's UUID in place of its number."""
    return (*arguments[:_DEVICE], uuid_of(arguments[_DEVICE]), *arguments[_DEVICE + 1 :])


class FlatMemory:
    """Memory for the bytes of one bucket after another. On a CPU it is kept, for the system hands out new memory page
    by page, slower than it is filled; CUDA's allocator keeps what is given back, and the trainer needs it."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def filled(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """The bytes of the tensors, one after another: [num_bytes], uint8; good until the next call."""
        parts = [as_bytes(tensor) for tensor in tensors]
        if parts[0].device.type != "cpu":
            return torch.cat(parts)
        size = sum(map(len, parts))
        if self.kept is None or len(self.kept) < size:
            self.kept = torch.empty(size, dtype=torch.uint8)
        return torch.cat(parts, out=self.kept[:size])


def _sizes(bucket: Bucket) -> list[int]:
    pairs = zip(bucket.shapes, bucket.dtypes, strict=True)
    return [num_bytes(shape, getattr(torch, dtype)) for shape, dtype in pairs]


def _shareable(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that another process can map. On a CPU by a file's name: a descriptor could be passed only to a process
    that knows our secret, and SGLang ends at the attempt."""
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    torch.multiprocessing.set_sharing_strategy("file_system")
    return torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
