"""The plugin that lets SGLang record routes of experts without CUDA."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from types import ModuleType

import pytest
import torch

from rlpost.rollout.server import STAND_INS

NAME = "rlpost_routes_on_cpu"


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, STAND_INS / NAME / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("has_cuda", [True, False])
def test_memory_is_registered_with_cuda_where_there_is_one(plugin, monkeypatch, has_cuda):
    registered = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    plugin.leave_unregistered(lambda *given: registered.append(given), "buffer", 4096)
    assert registered == [("buffer", 4096)] * has_cuda


def test_sglang_finds_the_plugin_by_its_entry_point():
    """As its loader looks for it: in the folder of stand-ins on the import path."""
    (found,) = importlib.metadata.distributions(name=NAME, path=[str(STAND_INS)])
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("sglang.srt.plugins", f"{NAME}:register")
