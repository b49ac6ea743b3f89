"""Block-wise FP8 compared with a plain loop over blocks, and its error bounds."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlpost.errors import WeightError
from rlpost.trainer.weights.importer import HuggingFaceFolder
from rlpost.trainer.weights.quantise import FP8, BlockFp8, dequantise, quantise, scale_shape

BLOCK = (128, 128)
FILE = "model.safetensors"


def engine_factor(largest, *, has_powers_of_two, dtype):
    """``compute_scale_from_amax`` of TransformerEngine 2.11 (recipe_common.cuh), for one block."""
    if largest == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        factor = np.float32(448) / np.float32(largest)
    if np.isinf(factor):
        factor = np.float32(torch.finfo(dtype).max)
    if has_powers_of_two:
        factor = (factor.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return factor


def block_by_block(weight, block, *, has_powers_of_two=False):
    """``block_scaled_cast_transpose_kernel`` of TransformerEngine 2.11: a plain loop over blocks."""
    rows, columns = scale_shape(tuple(weight.shape), block)
    values, scales = torch.empty(weight.shape, dtype=FP8), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            here = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            factor = engine_factor(
                weight[here].abs().max().float().item(),
                has_powers_of_two=has_powers_of_two,
                dtype=weight.dtype,
            )
            scales[i, j] = float(np.float32(1) / factor)
            values[here] = (weight[here].float() * float(factor)).to(FP8)
    return values, scales


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 70), (1, 1), (64, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("size", [0.02, 1e-38])
def test_engines_get_the_bits_of_the_trainer_s_products(shape, dtype, powers, size):
    draw = torch.Generator().manual_seed(3)
    weight = (torch.randn(shape, generator=draw) * size).to(dtype)
    values, scales = quantise(weight, BLOCK, has_powers_of_two=powers)
    wanted_values, wanted_scales = block_by_block(weight, BLOCK, has_powers_of_two=powers)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(values.view(torch.uint8), wanted_values.view(torch.uint8))


def test_dequantised_weights_are_off_by_at_most_a_sixteenth():
    """e4m3 has three bits of mantissa: half a step of the last is 1/16 of a value, below the
    smallest normal less.
    """
    weight = torch.randn(300, 260, generator=torch.Generator().manual_seed(4))
    values, scales = quantise(weight, BLOCK)
    back = dequantise(values, scales, BLOCK)
    smallest = scales.max() * torch.finfo(FP8).smallest_normal
    assert ((back - weight).abs() <= weight.abs() / 16 + smallest / 16).all()


def test_zeros_and_large_values_stay_finite():
    weight = torch.zeros(130, 130)
    weight[0, 0] = 3e38
    values, scales = quantise(weight, BLOCK)
    back = dequantise(values, scales, BLOCK)
    assert back.isfinite().all() and scales[1, 1] == 1.0
    assert back[0, 0] == pytest.approx(3e38, rel=1e-6)


def checkpoint(folder, quantization):
    config = {"architectures": ["Qwen3ForCausalLM"]} | (
        {"quantization_config": quantization} if quantization else {}
    )
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        "a.weight": torch.zeros(4, 4),
        "a.weight_scale_inv": torch.ones(1, 1),
        "norm.weight": torch.zeros(4),
    }
    save_file(weights, folder / FILE)


BLOCKWISE = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_a_checkpoint_says_which_weights_are_quantised(tmp_path):
    checkpoint(tmp_path, BLOCKWISE)
    folder = HuggingFaceFolder(tmp_path)
    assert folder.quantisation == BlockFp8(frozenset({"a.weight"}), (128, 128))
    assert set(folder.file_of) == {"a.weight", "norm.weight"}, "scales are no weights of the model"


def test_a_quantised_weight_is_read_as_the_engine_uses_it(tmp_path):
    checkpoint(tmp_path, BLOCKWISE)
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(5))
    values, scales = quantise(weight, BLOCK)
    save_file(
        {"a.weight": values, "a.weight_scale_inv": scales, "norm.weight": weight[0]},
        tmp_path / FILE,
    )
    folder = HuggingFaceFolder(tmp_path)
    assert torch.equal(folder.read("a.weight"), dequantise(values, scales, BLOCK))
    assert torch.equal(folder.read("norm.weight"), weight[0])


def test_a_checkpoint_in_full_precision_has_no_quantisation(tmp_path):
    checkpoint(tmp_path, None)
    assert HuggingFaceFolder(tmp_path).quantisation is None


def test_another_quantisation_is_refused_by_name(tmp_path):
    checkpoint(tmp_path, {"quant_method": "awq", "bits": 4})
    with pytest.raises(WeightError, match=r"'awq'.*block-wise FP8"):
        HuggingFaceFolder(tmp_path)


def test_shapes_are_those_of_the_tensors():
    quantisation = BlockFp8(frozenset({"a.weight"}))
    for name, tensor in {"a.weight": torch.randn(200, 64), "norm.weight": torch.randn(64)}.items():
        made = quantisation.tensors(name, tensor)
        expected = quantisation.shapes(name, tuple(tensor.shape), "float32")
        assert {
            key: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in made.items()
        } == expected
