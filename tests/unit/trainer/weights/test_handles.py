"""Handles to the trainer's memory.

Invariant: SGLang reads what torch writes, except for the device's name.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import inspect
import io
import mmap
import os
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from rlpost.trainer.weights import trainer_side
from rlpost.trainer.weights.layouts import as_bytes
from rlpost.trainer.weights.quantise import FP8


def test_a_handle_names_its_device_by_uuid_and_changes_nothing_else() -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    handle = trainer_side.with_uuid(tuple(names), lambda name: f"UUID of {name}")
    assert [one for one, name in zip(handle, names, strict=True) if one != name] == [
        "UUID of storage_device"
    ]


def test_a_handle_names_its_reference_counter_at_these_places() -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[trainer_side._COUNTER_FILE] == "ref_counter_handle"
    assert names[trainer_side._COUNTER_SLOT] == "ref_counter_offset"


def test_torch_keeps_shared_memory_in_a_file_of_that_folder_after_a_header() -> None:
    """Its counters of CUDA IPC are in the same kind of file (``RefcountedMapAllocator``)."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensor = torch.arange(3, dtype=torch.int64).share_memory_()
    _, name, _ = tensor.untyped_storage()._share_filename_cpu_()
    trainer_side._reset_counter(os.fsdecode(name), 2)
    assert tensor.tolist() == [0, 1, 0]
    trainer_side._reset_counter("/torch_file_that_does_not_exist", 0)


def test_sglang_expects_the_uuid_at_that_place() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations is not None
    text = (Path(found.submodule_search_locations[0]) / "srt/utils/patch_torch.py").read_text()
    place = re.search(r"^_REDUCE_TENSOR_ARG_DEVICE_INDEX = (\d+)", text, re.MULTILINE)
    assert place is not None and int(place[1]) == trainer_side._DEVICE
    assert "isinstance(device_maybe_uuid, str)" in text


class Buckets:
    """One bucket: a weight in FP8 of an odd size, its scale, and one in bfloat16."""

    def __init__(self) -> None:
        values = (torch.arange(15) / 3).view(5, 3)
        made = {
            "scale": torch.tensor([[0.5]]),
            "b": torch.arange(3, dtype=torch.bfloat16),
            "a": values.to(FP8),
        }
        self.tensors = made

    def gather(self, index: int, *, on_all_stages: bool) -> dict[str, torch.Tensor]:
        return {
            name: tensor + index if name == "b" else tensor for name, tensor in self.tensors.items()
        }

    def largest_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def sglang_module(path: str, name: str) -> ModuleType:
    """A module of SGLang, loaded from its file without the package."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations is not None
    spec = importlib.util.spec_from_file_location(
        name, Path(found.submodule_search_locations[0]) / path
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpickled(handle: str) -> tuple[Any, int]:
    """What is in a handle, and how many pieces of shared memory were opened for it."""
    opened = []

    class Counting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            if name != "rebuild_storage_filename":
                return found
            return lambda *given: (opened.append(given), found(*given))[1]

    given = Counting(io.BytesIO(base64.b64decode(handle))).load()
    return given, len(opened)


def test_sglangs_own_class_reads_the_handle_of_a_bucket() -> None:
    """However many tensors it has: torch wraps a storage once for each time that it is shared."""
    buckets = Buckets()
    sharing = trainer_side.Sharing(buckets)
    reader = sglang_module("srt/weight_sync/tensor_bucket.py", "sglang_tensor_bucket")
    for index in range(3):
        given, num_storages = unpickled(sharing.share(index))
        assert num_storages == 1
        metadata = [
            reader.FlattenedTensorMetadata(
                m.name, m.shape, m.dtype, m.start_idx, m.end_idx, m.numel
            )
            for m in given["metadata"]
        ]
        bucket = reader.FlattenedTensorBucket(
            flattened_tensor=given["flattened_tensor"], metadata=metadata
        )
        found = dict(bucket.reconstruct_tensors())
        wanted = buckets.gather(index, on_all_stages=True)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(
                found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
            )
    assert len(sharing.pieces) == 2


def test_sglangs_unpickler_admits_everything_in_a_handle() -> None:
    """Its unpickler refuses everything that is not in its list."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations is not None
    module = ast.parse(
        (Path(found.submodule_search_locations[0]) / "srt/utils/common.py").read_text()
    )
    (unpickler,) = [
        one for one in module.body if isinstance(one, ast.ClassDef) and one.name == "SafeUnpickler"
    ]
    (listed,) = [
        one.value
        for one in unpickler.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "ALLOWED_GLOBALS"
    ]
    allowed = ast.literal_eval(listed)
    data = base64.b64decode(trainer_side.Sharing(Buckets()).share(0))
    used: set[tuple[str, str]] = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            used.add((module, name))
            return super().find_class(module, name)

    Noting(io.BytesIO(data)).load()
    assert ("types", "SimpleNamespace") in used and used <= allowed
    assert ("torch.multiprocessing.reductions", "rebuild_cuda_tensor") in allowed


def test_a_tensor_on_the_host_is_pickled_as_torch_does() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    memory = torch.arange(3).share_memory_()
    trainer_side._HandlePickler(buffer).dump([("a", memory)])
    ((name, tensor),) = pickle.loads(buffer.getvalue())
    memory[0] = 7
    assert (name, tensor.tolist()) == ("a", [7, 1, 2])


class OnGpu(torch.Tensor):
    """A tensor that reports to be on a GPU."""

    is_cuda = True


class Counters:
    """torch's reference counters of CUDA IPC in a file, as ``_share_cuda_`` creates them."""

    def __init__(self, file: Path) -> None:
        self.file, self.number = file, 0
        file.write_bytes(bytes(trainer_side.COUNTERS_FROM + 8 * 100))
        with file.open("r+b") as opened:
            self.memory = mmap.mmap(opened.fileno(), 0)

    def reduce_tensor(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Share a tensor: a new counter is 1."""
        self.set(self.number, 1)
        arguments: list[Any] = [None] * 15
        arguments[6], arguments[11], arguments[12] = 0, b"/counters", self.number
        self.number += 1
        return reductions.rebuild_cuda_tensor, tuple(arguments)

    def get(self, slot: int) -> int:
        """Return a counter; it is unsigned, as torch reads it."""
        start = trainer_side.COUNTERS_FROM + 8 * slot
        return int.from_bytes(self.memory[start : start + 8], "little")

    def set(self, slot: int, value: int) -> None:
        """Set a counter."""
        start = trainer_side.COUNTERS_FROM + 8 * slot
        self.memory[start : start + 8] = (value % 2**64).to_bytes(8, "little")

    def read_by_an_engine(self, slot: int) -> None:
        """Decrement as the consumer's deleter does."""
        self.set(slot, self.get(slot) - 1)


@pytest.mark.parametrize(
    ("read", "what"),
    [
        ((0, 1, 2), "every handle was read"),
        ((0, 1), "an engine died before it read the last bucket, or while it read it"),
        ((0,), "an engine failed, and the next bucket was shared already"),
        ((), "the update was cancelled at its first bucket"),
    ],
)
def test_no_counter_keeps_cuda_memory_after_any_update(read, what, tmp_path, monkeypatch) -> None:
    """torch frees shared CUDA memory only when the counters of all of its handles are 0."""
    counters = Counters(tmp_path / "counters")
    at_collection: list[list[int]] = []

    def collect() -> None:
        assert not sharing.pieces
        at_collection.append([counters.get(slot) for slot in range(counters.number)])

    monkeypatch.setattr(trainer_side, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(trainer_side, "reduce_tensor", counters.reduce_tensor)
    monkeypatch.setattr(
        trainer_side,
        "_shareable",
        lambda size, _: torch.empty(size, dtype=torch.uint8).as_subclass(OnGpu),
    )
    monkeypatch.setattr(
        trainer_side, "as_bytes", lambda tensor: as_bytes(tensor).as_subclass(OnGpu)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-0")
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", collect)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    sharing = trainer_side.Sharing(Buckets())
    for _ in range(2):  # the second update has other counters
        first = counters.number
        for index in range(3):
            sharing.share(index)
        for index in read:
            counters.read_by_an_engine(first + index)
        sharing.release()
    assert at_collection == [[0] * 3, [0] * 6], what
