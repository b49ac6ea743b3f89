"""The plugin that lets SGLang serve latent attention without CUDA."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from rlpost.rollout.server import STAND_INS

NAME = "rlpost_latent_attention_on_cpu"


class Method(enum.Enum):
    """As SGLang's AttnForwardMethod names them."""

    MHA = enum.auto()
    MLA = enum.auto()


@pytest.mark.parametrize(
    ("has_cuda", "backend", "expected"),
    [
        (False, "torch_native", Method.MLA),
        (False, "intel_amx", Method.MHA),
        (True, "torch_native", Method.MHA),
    ],
)
def test_prompts_take_the_absorbed_form_on_the_attention_of_a_cpu(
    monkeypatch, has_cuda, backend, expected
):
    spec = importlib.util.spec_from_file_location(NAME, STAND_INS / NAME / "__init__.py")
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    attention = SimpleNamespace(current_attention_backend=backend)
    assert plugin.absorbed(Method.MHA, attention, "batch") is expected


def test_sglang_finds_the_plugin_by_its_entry_point():
    """As its loader looks for it: in the folder of stand-ins on the import path."""
    (found,) = importlib.metadata.distributions(name=NAME, path=[str(STAND_INS)])
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("sglang.srt.plugins", f"{NAME}:register")
