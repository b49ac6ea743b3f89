"""Trainer side of a weight update: send full weights to the engines in flat buckets.

Input: the exporter of this rank. Output: the buckets, in order, over one of two transports. The
HTTP requests to the engines are made by ``rlpost.engines.engine_side_weights``.

- ``Broadcast``: engines on other GPUs. Each pipeline stage has a separate process group with all
  engine ranks: its source is rank 0, the engine ranks follow. Both sides block on each other.
- ``Sharing``: engines on the trainer's GPUs. Each rank copies the bucket into a memory buffer and
  returns a handle to it (CUDA IPC; shared memory on a CPU). No data is sent.

Both gather the next bucket while the engines load the current one.

The bytes of a bucket are its tensors, flattened and concatenated: SGLang's load format
"flattened_bucket". Tensors with larger elements come first, because SGLang views the bytes in place
and torch requires alignment for that.
"""

from __future__ import annotations

import base64
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from rlpost.config.plan.weight_update import bucket_bytes
from rlpost.errors import SyncError
from rlpost.trainer.weights.engine_group import EngineGroup, Sender
from rlpost.trainer.weights.exporter import Exporter, describe, sent_bytes
from rlpost.trainer.weights.layouts import as_bytes, tensor_bytes
from rlpost.trainer.weights.quantise import BlockFp8

# indices among the arguments of torch's rebuild_cuda_tensor
_DEVICE, _COUNTER_FILE, _COUNTER_SLOT = 6, 11, 12
SHARED_MEMORY = Path("/dev/shm")  # of POSIX shm_open on Linux
COUNTERS_FROM = 64
"""Offset of the counters in torch's file, in bytes (``map_alloc_alignment`` of MapAllocator.cpp)."""
COUNTER_BYTES = 8


class Buckets:
    """The trainer's weights in buckets for the engines, with the same plan on every rank."""

    def __init__(
        self,
        exporter: Exporter,
        *,
        limit: int,
        num_engines: int = 1,
        device_bytes: int | None = None,
        quantisation: BlockFp8 | None = None,
    ) -> None:
        """Plan the buckets.

        ``limit`` bounds a bucket in bytes, unless a single weight is larger; ``bucket_bytes``
        chooses the size within it. ``device_bytes`` is the memory of a GPU, the same on every rank.
        Without ``quantisation`` weights are sent in the trainer's precision.
        """
        self.exporter = exporter
        self.quantisation = quantisation
        total = sum(sent_bytes(entry, quantisation) for entry in exporter.inventory.entries)
        size = bucket_bytes(total, limit=limit, num_engines=num_engines, device_bytes=device_bytes)
        self.entries = exporter.plan(size, quantisation=quantisation)
        self.plan = tuple(describe(bucket, quantisation) for bucket in self.entries)
        """Names, shapes and dtypes of each bucket."""

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def stage(self) -> int:
        return self.exporter.inventory.groups.pipeline.rank()

    def stage_of(self, index: int) -> int:
        """The pipeline stage that holds a bucket's weights."""
        return self.entries[index][0].owner

    def gather(self, index: int, *, on_all_stages: bool) -> dict[str, torch.Tensor]:
        """Full tensors of a bucket, in plan order.

        Collective of all stages, or of the bucket's stage.
        """
        tensors = self.exporter.gather(
            self.entries[index], on_all_stages=on_all_stages, quantisation=self.quantisation
        )
        return {name: tensors[name] for name in self.plan[index].names}

    def take_part(self, index: int) -> None:
        """Take part in gathering a bucket within its stage; the result is discarded."""
        self.exporter.gather(
            self.entries[index],
            on_all_stages=False,
            quantisation=self.quantisation,
            gets_tensors=False,
        )

    def largest_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max(sum(tensor_bytes(bucket).values()) for bucket in self.plan)


class Broadcast(Sender):
    """Sends buckets to engines on other GPUs.

    All methods but ``abort`` are collective: call on every rank, in order.
    """

    def __init__(
        self,
        buckets: Buckets,
        *,
        gathers: bool,
        is_source: bool,
        backend: str,
        timeout_s: float,
        secret: str | None,
    ) -> None:
        """Create an unconnected sender.

        ``gathers``: this rank holds parts of the same model replica as the source of its stage.
        ``is_source``: it is that source. ``timeout_s`` is the deadline of each broadcast.
        ``secret``: see ``EngineGroup.form``.
        """
        super().__init__(backend=backend, timeout_s=timeout_s, secret=secret)
        self.buckets = buckets
        self.stage = buckets.stage
        self.gathers = gathers
        self.is_source = is_source
        self.memory = FlatMemory()
        self.gathered: torch.Tensor | None = None
        """Bytes of the next bucket, on its source."""

    def connect(
        self,
        master_addr: str,
        master_port: int,
        num_engine_ranks: int,
        group_name: str,
        join_s: float,
    ) -> None:
        """Form the process group of this rank's stage with the engines.

        The source of the stage listens on the address; other ranks do nothing.

        Raises:
            SyncError: the engines did not join within ``join_s`` seconds, or ``abort`` was called.
        """
        if not self.is_source:
            return
        if self.group is not None:
            raise SyncError(
                f"already connected to engines; disconnect before connecting {group_name!r}"
            )
        self.group = EngineGroup.form(
            (master_addr, master_port),
            name=group_name,
            num_engine_ranks=num_engine_ranks,
            backend=self.backend,
            timeout=self.timeout,
            join=timedelta(seconds=join_s),
            secret=self.secret,
            cancelled=self._cancelled,
        )

    def send(self, index: int) -> None:
        """Broadcast bucket ``index``, then gather the next one while the engines load it.

        Call on every trainer rank, for all buckets in order. Bucket 0 is gathered here.

        Raises:
            SyncError: an engine did not take part in time, or ``abort`` was called.
        """
        if index == 0:
            self.gathered = None  # left over from an aborted update
            self._gather(index)
        flat, self.gathered = self.gathered, None
        failure = None
        if flat is not None:
            failure = self._broadcast(index, flat)
            del flat  # free it before the next gather
        # Gather after a failure too: the other ranks of the stage do not see it and wait for this
        # rank.
        if index + 1 < len(self.buckets):
            self._gather(index + 1)
        if failure is not None:
            raise failure

    def _gather(self, index: int) -> None:
        """Gather a bucket; only the source keeps its bytes.

        Collective of the ranks that hold it.
        """
        if not self.gathers or self.buckets.stage_of(index) != self.stage:
            return
        if self.is_source:
            tensors = self.buckets.gather(index, on_all_stages=False)
            self.gathered = self.memory.filled(tensors.values())
        else:
            self.buckets.take_part(index)

    def _broadcast(self, index: int, flat: torch.Tensor) -> SyncError | None:
        """Send a bucket; returns the error, if any."""
        if self.group is None:
            return SyncError("no engine is connected; call connect before send")
        try:
            self.group.broadcast(flat)
        except SyncError as error:
            self.memory = FlatMemory()  # an abandoned broadcast may still read the old memory
            return SyncError(
                f"bucket {index + 1} of {len(self.buckets)} ({flat.numel()} bytes) did not reach all engines: {error}"
            )
        return None


class SharedBuffers:
    """Memory that engines on the same device read by handle.

    Two buffers, each as large as the largest bucket, alternate: the engines load from one while the
    other is filled. An engine responds after it has copied a bucket into its model. So memory in
    use is never overwritten if bucket ``index`` is shared after all responses to ``index - 2``.
    """

    def __init__(self) -> None:
        self.pieces: dict[int, torch.Tensor] = {}
        self._counters: list[tuple[str, int]] = []
        """File and slot of torch's reference counter of each handle since the last ``release``."""

    def piece(self, index: int, size: int, largest: int, device: torch.device) -> torch.Tensor:
        """Memory [size], uint8, for the bytes of bucket ``index``; ``largest`` is that of all buckets."""
        piece = self.pieces.get(index % 2)
        if piece is None or piece.numel() < size:
            piece = self.pieces[index % 2] = _shareable(largest, device)
        return piece[:size]

    def handle(self, value: object, device: torch.device) -> str:
        """Pickle a value with buffers for a reader on this device, in base64.

        It is valid for one reader (torch counts references).
        """
        if device.type == "cuda":
            torch.cuda.synchronize()  # the engine's stream does not wait for ours
        buffer = io.BytesIO()
        pickler = _HandlePickler(buffer)
        pickler.dump(value)
        self._counters += pickler.counters
        return base64.b64encode(buffer.getvalue()).decode()

    def release(self) -> None:
        """Free the memory, once every engine has responded or its process has ended.

        torch keeps CUDA memory until the reader of each handle has decremented its counter. A
        handle that was not read, or whose reader was killed, would keep it until this process ends.
        """
        for file, slot in self._counters:
            _reset_counter(file, slot)
        self._counters.clear()
        self.pieces.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class Sharing(SharedBuffers):
    """Shares buckets with engines on the same device. Collective: call on every rank, in order."""

    def __init__(self, buckets: Buckets) -> None:
        super().__init__()
        self.buckets = buckets

    def share(self, index: int) -> str:
        """Gather bucket ``index`` and return a handle to it. Call on every trainer rank.

        The handle is the base64 argument of SGLang's update_weights_from_tensor with the load
        format "flattened_bucket". It is valid for one reader, until the second call after this one.
        """
        tensors = self.buckets.gather(index, on_all_stages=True)
        size = sum(tensor.nbytes for tensor in tensors.values())
        device = next(iter(tensors.values())).device
        flat = self.piece(index, size, self.buckets.largest_bytes(), device)
        torch.cat([as_bytes(tensor) for tensor in tensors.values()], out=flat)
        return self.handle({"flattened_tensor": flat, "metadata": _metadata(tensors)}, device)


def _metadata(tensors: Mapping[str, torch.Tensor]) -> list[SimpleNamespace]:
    """Locate each tensor in the bytes.

    The attributes are those of SGLang's FlattenedTensorMetadata.

    SGLang reads the attributes of any object that its unpickler admits, so its package is not
    needed here.
    """
    metadata, start = [], 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        place = {"start_idx": start, "end_idx": end, "numel": end - start}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
        start = end
    return metadata


class _HandlePickler(ForkingPickler):
    """Pickles CUDA tensors with the UUID of their GPU instead of its index.

    The index is that of this process, which sees one GPU; an engine over several GPUs numbers it
    differently. SGLang accepts both (sglang/srt/utils/patch_torch.py; pytorch issue 149196).
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.counters: list[tuple[str, int]] = []
        """File and slot of the reference counter of each CUDA tensor."""

    def reducer_override(self, value: object) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        file, slot = arguments[_COUNTER_FILE], arguments[_COUNTER_SLOT]
        self.counters.append((os.fsdecode(file), slot))
        return rebuild, with_uuid(
            arguments, lambda number: str(torch.cuda.get_device_properties(number).uuid)
        )


def _reset_counter(file: str, slot: int) -> None:
    """Set a reference counter of torch's CUDA IPC to 0 (torch/csrc/CudaIPCTypes.h).

    Setting is idempotent. torch's own ``_release_ipc_counter`` decrements, and below 0 the unsigned
    counter wraps, so it may not be called where the reader may have decremented too.
    """
    try:
        counters = os.open(SHARED_MEMORY / file.lstrip("/"), os.O_WRONLY)
    except FileNotFoundError:
        return  # torch removes a file when all of its handles are free
    try:
        os.pwrite(counters, bytes(COUNTER_BYTES), COUNTERS_FROM + COUNTER_BYTES * slot)
    finally:
        os.close(counters)


def with_uuid(arguments: tuple[Any, ...], uuid_of: Callable[[int], str]) -> tuple[object, ...]:
    """Arguments of torch's ``rebuild_cuda_tensor`` with the device's UUID instead of its index."""
    return (*arguments[:_DEVICE], uuid_of(arguments[_DEVICE]), *arguments[_DEVICE + 1 :])


class FlatMemory:
    """Memory for the bytes of successive buckets.

    On a CPU it is kept, because page faults of new memory take longer than filling it. On CUDA the
    caching allocator keeps freed memory, and the trainer needs it between buckets.
    """

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def filled(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Concatenated bytes of the tensors: [num_bytes], uint8; valid until the next call."""
        parts = [as_bytes(tensor) for tensor in tensors]
        if parts[0].device.type != "cpu":
            return torch.cat(parts)
        size = sum(map(len, parts))
        if self.kept is None or len(self.kept) < size:
            self.kept = torch.empty(size, dtype=torch.uint8)
        return torch.cat(parts, out=self.kept[:size])


def _shareable(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that another process can map.

    On a CPU it is shared by file name: passing a descriptor requires multiprocessing's authkey, and
    SGLang terminates at the attempt.
    """
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    torch.multiprocessing.set_sharing_strategy("file_system")
    # torch's manager of such files puts a socket into TMPDIR, which may not exist on this node
    os.environ["TMPDIR"] = tempfile.gettempdir()
    return torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
