"""Handles to the trainer's memory. Invariant: SGLang reads what torch writes, but for the device's name."""

from __future__ import annotations

import importlib.util
import inspect
import io
import pickle
import re
from pathlib import Path

import torch
from torch.multiprocessing import reductions

from rlpost.weights import sync


def test_the_device_of_a_handle_is_named_by_its_uuid_and_nothing_else_changes() -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    handle = sync.with_uuid(tuple(names), lambda name: f"UUID of {name}")
    assert [one for one, name in zip(handle, names, strict=True) if one != name] == ["UUID of storage_device"]


def test_sglang_expects_the_uuid_at_that_place() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations is not None
    text = (Path(found.submodule_search_locations[0]) / "srt/utils/patch_torch.py").read_text()
    place = re.search(r"^_REDUCE_TENSOR_ARG_DEVICE_INDEX = (\d+)", text, re.MULTILINE)
    assert place is not None and int(place[1]) == sync._DEVICE
    assert "isinstance(device_maybe_uuid, str)" in text


def test_a_tensor_of_the_host_is_pickled_as_torch_does_it() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    memory = torch.arange(3).share_memory_()
    sync._HandlePickler(buffer).dump([("a", memory)])
    ((name, tensor),) = pickle.loads(buffer.getvalue())
    memory[0] = 7
    assert (name, tensor.tolist()) == ("a", [7, 1, 2])
