"""The plugin for latent attention without CUDA."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest
import torch

from tests.unit.rollout.plugins import load_plugin

NAME = "rlpost_latent_attention_on_cpu"


class Method(enum.Enum):
    """The names of SGLang's AttnForwardMethod."""

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
def test_prompts_use_the_absorbed_form_with_attention_on_a_cpu(
    monkeypatch, has_cuda, backend, expected
):
    plugin = load_plugin(NAME)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    attention = SimpleNamespace(current_attention_backend=backend)
    assert plugin.absorbed(Method.MHA, attention, "batch") is expected
