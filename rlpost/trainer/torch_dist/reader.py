"""Read chunks of a torch_dist checkpoint of any layout directly into tensors.

Input: a folder and the chunks that this rank holds. Output: their live tensors, filled. Each stored
box is read once and its parts are copied to their targets, so only a few stored boxes are in memory
besides the tensors. Not collective: each rank reads independently.
"""

from __future__ import annotations

import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint import Metadata, filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from rlpost.errors import CheckpointError
from rlpost.trainer.torch_dist.shards import Chunk

NUM_THREADS = 2
Needed = list[tuple[ReadItem, Chunk]]


class StoredTensors:
    """The tensors of a checkpoint."""

    def __init__(self, folder: str | Path) -> None:
        """Read the metadata. Raises OSError, and CheckpointError if it would run code."""
        self._folder = Path(folder)
        try:
            metadata = read_metadata(str(self._folder))
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{self._folder}: {error}") from error
        self._tensors = {
            key: found
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        self._places: dict[object, _StorageInfo] = metadata.storage_data

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def read_into(self, chunks: Sequence[Chunk], target: Callable[[Chunk], torch.Tensor]) -> None:
        """Fill ``target(chunk)``, [numel] each, with the stored values.

        Elements beyond the stored shape of a tensor that may differ (a padded vocabulary) become 0.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or lacks an element.
            OSError: a file cannot be read.
        """
        by_file: dict[str, dict[int, Needed]] = defaultdict(lambda: defaultdict(list))
        by_key: dict[str, list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            by_key[chunk.key].append(chunk)
        for key, key_chunks in by_key.items():
            for item, chunk in self._needed(key, key_chunks, target):
                place = self._places[item.storage_index]
                by_file[place.relative_path][place.offset].append((item, chunk))
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checkpoint-read") as pool:
            list(pool.map(lambda one: self._read_file(one[0], one[1], target), by_file.items()))

    def _needed(
        self, key: str, chunks: Sequence[Chunk], target: Callable[[Chunk], torch.Tensor]
    ) -> Needed:
        stored = self._tensors.get(key)
        if stored is None:
            raise CheckpointError(
                f"{self._folder} has no tensor {key}; use a checkpoint of this model"
            )
        chunk = chunks[0]
        if tuple(stored.size) != chunk.global_shape and not chunk.may_differ:
            raise CheckpointError(
                f"{self._folder}: {key} has shape {tuple(stored.size)}, but the model needs {chunk.global_shape}"
            )
        boxes = [
            ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
            for each in chunks
        ]
        items = create_read_items_for_chunk_list(key, stored, boxes)
        needed = [(item, chunks[item.dest_index.index or 0]) for item in items]
        numel = sum(item.lengths.numel() for item in items)
        if numel == sum(each.numel for each in chunks):
            return needed
        if not chunk.may_differ:
            raise CheckpointError(f"{self._folder}: {key} is incomplete; use another checkpoint")
        for each in chunks:
            target(each).zero_()
        return needed

    def _read_file(
        self, name: str, needed: dict[int, Needed], target: Callable[[Chunk], torch.Tensor]
    ) -> None:
        path = self._folder / name
        if path.parent.resolve() != self._folder.resolve():
            raise CheckpointError(
                f"{self._folder}: .metadata names {name}, outside of the folder: do not use it unless "
                "you trust its author"
            )
        with open(path, "rb") as file:
            for offset, reads in sorted(needed.items()):
                length = self._places[reads[0][0].storage_index].length
                one = _create_file_view(file, offset, length)
                stored = torch.load(one, map_location="cpu", weights_only=True)
                for item, chunk in reads:
                    box = target(chunk).view(chunk.sizes)
                    _part(box, item.dest_offsets, item.lengths).copy_(
                        _part(stored, item.storage_offsets, item.lengths)
                    )


def _part(tensor: torch.Tensor, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor


SEARCHED = {"torch", "torch.distributed.checkpoint.metadata"}
"""Modules from which values like ``torch.float32`` and classes that are defined there are admitted."""
VALUES = (torch.dtype, torch.memory_format, torch.layout)
ADMITTED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ADMITTED:
            return super().find_class(module, name)
        # One name, without dots: "dump.__globals__" would lead out of the module.
        found = getattr(sys.modules.get(module), name, None) if module in SEARCHED else None
        is_own_class = isinstance(found, type) and found.__module__ == module != "torch"
        if is_own_class or isinstance(found, VALUES):
            return found
        raise pickle.UnpicklingError(
            f".metadata names {module}.{name}, which no checkpoint needs: do not use this folder "
            "unless you trust its author"
        )


def load(file: BinaryIO) -> Any:
    """Unpickle metadata. Raises pickle.UnpicklingError when it names anything else.

    A pickle can call any function, and folders of converted weights are shared. This replaces
    torch's for every reader in this process, Megatron's included.
    """
    return _Unpickler(file).load()


filesystem.pickle = SimpleNamespace(**{**vars(pickle), "load": load})  # type: ignore[attr-defined]


def read_metadata(folder: str) -> Metadata:
    """Return the metadata of a folder.

    Raises:
        OSError: there is none.
        pickle.UnpicklingError: it names functions or classes that do not belong there.
    """
    return filesystem.FileSystemReader(folder).read_metadata()


def files_without(folder: str | Path, prefix: str) -> set[str]:
    """Return the names of the files that a reader of a folder without some of its tensors reads.

    Its own files of metadata, and each with a tensor or object whose key does not begin with
    ``prefix``. Raises as ``read_metadata`` does.
    """
    places = read_metadata(str(folder)).storage_data
    files = {place.relative_path for key, place in places.items() if not key.fqn.startswith(prefix)}
    return files | {".metadata", "metadata.json", COMMON_STATE_FNAME}
