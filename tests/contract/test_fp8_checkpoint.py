"""A whole checkpoint in FP8 blocks, in the form of DeepSeek-V3's files.

It is read at a layout, exported in the trainer's precision, and sent to engines in FP8. The
expected weights are decoded here, from bits: e4m3 has a sign, four bits of exponent with bias 7 and
three of mantissa, and each block of 128 x 128 has a float32 factor (``weight_scale_inv``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlpost.extensions.converting.fp8_folder import write_fp8_folder
from tests.contract.actor_ranks import run_ranks
from tests.contract.families import load_folder, make_family
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
BLOCK = 128
LARGEST = 0x7E
"""The byte of 448, the largest number in e4m3."""
SCALE = "_scale_inv"
LAYOUT = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def value_of(byte: int) -> float:
    """Return the number of a byte in e4m3 (OCP 8-bit floating point, table 1)."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 0x7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = np.array([value_of(byte) for byte in range(256)], dtype=np.float32)


def decoded(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the number of each byte times the factor of its block."""
    rows, columns = (np.arange(length) // BLOCK for length in values.shape)
    return VALUES[values] * scales[rows[:, None], columns]


def encoded(source: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return random bytes without NaN, and random factors of the blocks.

    Each block has a byte of the largest magnitude, so that quantising it again gives the same
    factor.
    """
    values = source.integers(0, 127, shape, dtype=np.uint8)
    values[::BLOCK, ::BLOCK] = LARGEST
    values |= source.integers(0, 2, shape, dtype=np.uint8) << 7
    scales = source.uniform(1e-3, 3e-3, [-(-length // BLOCK) for length in shape])
    return values, scales.astype(np.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder, and bytes and factors of each weight in FP8.

    As in DeepSeek-V3 these are the matrices of the layers except the router, here also except the
    shared experts, which 8 GPUs of an engine could not share by blocks. Some shards of the layout
    are whole blocks, others end within a block.
    """
    folder = tmp_path_factory.mktemp("fp8")
    make_family(folder, "deepseek-v3-wide-moe")
    stored, source, pairs = load_folder(folder), np.random.default_rng(5), {}
    ends = ("_proj.weight", "_mqa.weight")
    for name in [one for one in stored if one.endswith(ends) and "shared" not in one]:
        pairs[name] = encoded(source, tuple(stored[name].shape))
        values, scales = map(torch.from_numpy, pairs[name])
        stored[name] = values.view(torch.float8_e4m3fn)
        stored[name + SCALE] = scales
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    said = json.loads(config.read_text()) | {"quantization_config": QUANTIZATION}
    config.write_text(json.dumps(said))
    return folder, pairs


def read_and_write(actor: Any, *, export: str) -> dict[str, Any]:
    """Import, export to a folder, and gather what engines get; 8 and 16 bits as bytes."""
    actor.import_weights()
    actor.export(export)
    sent = {}
    for index in range(len(actor.buckets)):
        for name, tensor in actor.buckets.gather(index, on_all_stages=True).items():
            sent[name] = stored_form(tensor).clone().numpy()
    return sent


def stored_form(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that NumPy knows, with the same bytes."""
    return tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint8)


@pytest.fixture(scope="module")
def found(
    checkpoint: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """Return the exported folder, and what each rank would send."""
    export = tmp_path_factory.mktemp("exported")
    settings = rank_config(str(checkpoint[0]), distributed_timeout_minutes=2, **LAYOUT)
    return export, run_ranks(read_and_write, 2, settings, export=str(export))


def test_an_import_dequantises_the_checkpoint(checkpoint, found):
    """The export is exact bit for bit, and tensors that are not in FP8 are unchanged."""
    (folder, pairs), (export, _) = checkpoint, found
    exported, stored = load_folder(export), load_folder(folder)
    assert exported.keys() == {name for name in stored if not name.endswith(SCALE)}
    assert {"q_a_proj", "kv_a_proj_with_mqa", "gate_proj"} <= {one.split(".")[-2] for one in pairs}
    for name, tensor in exported.items():
        if name in pairs:
            assert np.array_equal(tensor.numpy(), decoded(*pairs[name])), name
        else:
            assert torch.equal(tensor, stored[name]), name
    assert "quantization_config" not in json.loads((export / "config.json").read_text())


def test_engines_receive_the_original_checkpoint(checkpoint, found):
    """The bytes are the same; factors differ by the rounding of 448 x factor / 448 in float32."""
    (folder, pairs), (_, ranks) = checkpoint, found
    stored = load_folder(folder)
    for sent in ranks:
        assert sent.keys() == stored.keys()
        for name, values in sent.items():
            if name in pairs:
                assert np.array_equal(values, pairs[name][0]), name
            elif name.endswith(SCALE):
                expected = pairs[name.removesuffix(SCALE)][1]
                np.testing.assert_allclose(values, expected, rtol=2.0**-22, err_msg=name)
            else:
                assert np.array_equal(values, stored[name].numpy()), name


def test_weights_sent_to_engines_decode_to_those_of_the_trainer(checkpoint, found):
    (_, pairs), (export, ranks) = checkpoint, found
    exported = load_folder(export)
    for name in pairs:
        again = decoded(ranks[0][name], ranks[0][name + SCALE])
        np.testing.assert_allclose(again, exported[name].numpy(), rtol=2.0**-22, err_msg=name)


def test_engines_receive_the_bytes_of_a_converted_folder(found, tmp_path):
    """The trainer's weights, as they are exported, in FP8 blocks: folder and update are equal."""
    export, ranks = found
    write_fp8_folder(export, tmp_path / "converted")
    converted = load_folder(tmp_path / "converted")
    for sent in ranks:
        assert sent.keys() == converted.keys()
        for name, tensor in converted.items():
            assert np.array_equal(sent[name], stored_form(tensor).numpy()), name


@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3-next-moe"])
def test_weights_that_are_float32_beside_fp8_blocks_are_those_of_an_update(name, tmp_path):
    """The decay and the norm after linear attention, as published: float32 in a model of bfloat16."""
    source, converted = tmp_path / name, tmp_path / "converted"
    make_family(source, name)
    float32 = ("linear_attn.A_log", "linear_attn.norm.weight")
    tensors = {
        key: tensor if key.endswith(float32) else tensor.bfloat16()
        for key, tensor in load_folder(source).items()
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(said))
    write_fp8_folder(source, converted)
    settings = rank_config(str(converted), bf16=True, distributed_timeout_minutes=2)
    (sent,) = run_ranks(read_and_write, 1, settings, export=str(tmp_path / "out"))
    folder = load_folder(converted)
    assert sent.keys() == folder.keys()
    for key, tensor in folder.items():
        ours = stored_form(tensor).numpy()
        assert sent[key].dtype == ours.dtype and np.array_equal(sent[key], ours), key
        assert (tensor.dtype == torch.float32) == key.endswith((*float32, SCALE)), key
