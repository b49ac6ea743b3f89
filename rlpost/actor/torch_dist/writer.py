"""Writes what a host stream delivers, in torch's format of distributed checkpoints (torch_dist).

Input: the chunks of this rank and the stream that brings them, small objects. Output: two files a rank and the metadata
of all of them. A failure on one rank is raised on every rank. torch's own writer keeps every tensor of a file until the
file is complete and loses what its second thread raises (torch 2.13); here the memory of a written batch is free again.

Megatron's writer forks, and spawns a manager that runs ``__main__`` again: neither may happen in a process with threads
whose ``__main__`` is not ours, such as a worker of a cluster runtime. The files are the same.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlpost.actor.torch_dist.host_stream import HostStream
from rlpost.actor.torch_dist.shards import Chunk

NUM_THREADS = 2
"""Of a rank, and files that it writes."""
MAX_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class Contents:
    """What this rank writes: chunks, which the stream brings in this order, and small objects by key."""

    chunks: Sequence[Chunk]
    objects: Mapping[str, bytes]


def write(folder: str | Path, contents: Contents, stream: HostStream, *, group: dist.ProcessGroup | None) -> None:
    """Write the files of all ranks into an existing folder, each flushed to disk. A collective of a ``group`` (all
    ranks) that nothing else uses at the time.

    Raises CheckpointException with what failed on which rank, on every rank.
    """
    try:
        torch_checkpoint.save(
            {},
            storage_writer=_Writer(folder, contents, stream),
            planner=_Planner(contents),
            process_group=group,
        )
    finally:
        stream.close()


class _Planner(SavePlanner):
    """Each rank writes its own chunks; together they must be every element of every tensor, once."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the contents are known."""

    def create_local_plan(self) -> SavePlan:
        """The chunks in their order, then the objects."""
        chunks = [_tensor_item(chunk) for chunk in self._contents.chunks]
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._contents.objects]
        return SavePlan([*chunks, *objects])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the first rank. Raises CheckpointingException when an element is missing, or written twice."""
        plans, metadata = create_default_global_save_plan(all_plans)
        if problems := _validate_global_plan(plans, metadata):
            more = f" and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
            raise CheckpointingException(f"the ranks do not cover the state: {problems[:MAX_PROBLEMS]}{more}")
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The items keep their order; the global plan added their index in the metadata."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> io.BytesIO:
        """The bytes of an object; chunks come from the stream."""
        return io.BytesIO(self._contents.objects[write_item.index.fqn])


def _tensor_item(chunk: Chunk) -> WriteItem:
    where = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
    properties = TensorProperties(dtype=chunk.shard.dtype)
    data = TensorWriteData(where, properties, torch.Size(chunk.global_shape))
    return WriteItem(MetadataIndex(chunk.key, where.offsets), WriteItemType.SHARD, tensor_data=data)


class _Writer(torch_checkpoint.FileSystemWriter):
    """torch's writer of the metadata, with our own of the data."""

    def __init__(self, folder: str | Path, contents: Contents, stream: HostStream) -> None:
        super().__init__(folder)
        self._contents = contents
        self._stream = stream

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all batches by some threads, each into a file. Raises OSError with what went wrong beneath."""
        prefix = plan.storage_data.prefix
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checkpoint-write") as pool:
            tasks = [
                pool.submit(self._write_file, f"{prefix}{number}.distcp", plan.items, is_first=number == 0)
                for number in range(NUM_THREADS)
            ]
            errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for task in tasks for result in task.result()])
        return done

    def _write_file(self, name: str, items: Sequence[WriteItem], *, is_first: bool) -> list[WriteResult]:
        """Write batches until none is left; returns where each item is. The first file also holds the objects."""
        results = []
        try:
            with open(Path(self.path) / name, "wb") as file:
                if is_first:
                    for item in items[len(self._contents.chunks) :]:
                        data = self._contents.objects[item.index.fqn]
                        results.append(_written(file, name, item, lambda data=data: file.write(data)))  # type: ignore[misc]
                while (filled := self._stream.take()) is not None:
                    for index, flat in zip(filled.batch.indices, filled.tensors, strict=True):
                        tensor = flat.view(self._contents.chunks[index].sizes)
                        results.append(_written(file, name, items[index], lambda tensor=tensor: _save(tensor, file)))  # type: ignore[misc]
                    self._stream.release(filled)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            self._stream.cancel(error)  # else the copying thread waits for a free slot
            raise
        return results


def _written(file: BinaryIO, name: str, item: WriteItem, put: Any) -> WriteResult:
    offset = file.tell()
    put()
    length = file.tell() - offset
    return WriteResult(item.index, length, _StorageInfo(name, offset, length))


def _save(tensor: torch.Tensor, file: BinaryIO) -> None:
    """torch.save, with the reason that lies beneath its complaint about its own file format."""
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        beneath = error.__context__
        raise OSError(str(beneath if isinstance(beneath, OSError) else error)) from error
