"""FP8 blocks made on the device, compared with those made on the CPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from rlpost.trainer.weights.quantise import quantise


@pytest.mark.parametrize("block", [(128, 128), (16, 16)])
@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_made_on_the_device_equal_those_of_the_cpu(
    device: str, block: tuple[int, int], dtype: torch.dtype, powers: bool
) -> None:
    """The weight has sizes that no block divides, a block of zeros, and values over many powers of
    two.
    """
    torch.manual_seed(1)
    weight = (torch.randn(300, 200) * torch.logspace(-6, 3, 200)).to(dtype)
    weight[:16, :16] = 0
    values, scales = quantise(weight, block, has_powers_of_two=powers)
    found, found_scales = quantise(weight.to(device), block, has_powers_of_two=powers)
    assert (found.device.type, found_scales.device.type) == (device, device)
    assert torch.equal(found_scales.cpu(), scales)
    assert torch.equal(found.cpu().view(torch.uint8), values.view(torch.uint8))


@pytest.mark.needs("transformer-engine", cuda=True)
@pytest.mark.parametrize("powers", [False, True])
def test_products_of_transformer_engine_have_the_bits_of_the_engines(
    device: str, powers: bool
) -> None:
    name = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
    tensors, library = map(importlib.import_module, (name, "transformer_engine_torch"))
    torch.manual_seed(2)
    weight = (torch.randn(384, 256) * torch.logspace(-6, 3, 256)).to(device, torch.bfloat16)
    rounded = tensors.Float8BlockQuantizer(
        library.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=powers
    )(weight)
    values, scales = quantise(weight, (128, 128), has_powers_of_two=powers)
    padded = rounded._rowwise_scale_inv
    assert torch.equal(padded[: scales.shape[0], : scales.shape[1]], scales)
    assert torch.equal(rounded._rowwise_data.view(torch.uint8), values.view(torch.uint8))
