"""The plugin for FP8 on a CPU, compared with the dequantised weights."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlpost.trainer.weights.quantise import dequantise, quantise
from tests.unit.rollout.plugins import load_plugin

NAME = "rlpost_fp8_on_cpu"
BLOCK = (16, 16)


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return load_plugin(NAME)


def never(*_args: object) -> torch.Tensor:
    raise AssertionError("SGLang's own way needs AMX or CUDA")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA SGLang's own kernels are used")
def test_a_matrix_in_blocks_is_multiplied_as_its_dequantised_weight(plugin):
    """A matrix of 40 x 24 in blocks of 16 has smaller blocks at its edges."""
    torch.manual_seed(0)
    values, scales = quantise(torch.randn(40, 24), BLOCK)
    x, bias = torch.randn(3, 5, 24), torch.randn(40)
    layer = SimpleNamespace(weight=values, weight_scale_inv=scales)
    method = SimpleNamespace(block_quant=True, weight_block_size=list(BLOCK))
    expected = torch.nn.functional.linear(x, dequantise(values, scales, BLOCK), bias)
    torch.testing.assert_close(plugin.multiply(never, method, layer, x, bias), expected)
    plugin.keep_as_loaded(never, method, layer)


def test_weights_that_are_not_in_blocks_are_left_to_sglang(plugin):
    method = SimpleNamespace(block_quant=False)
    assert plugin.multiply(lambda *_: "its own", method, None, None) == "its own"


def test_activations_may_be_float32(plugin):
    assert plugin.with_float32([torch.bfloat16]) == [torch.bfloat16, torch.float32]
