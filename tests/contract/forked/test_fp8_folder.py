"""A folder in FP8 blocks, read and made again by SGLang's and transformers' own functions."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from rlpost.extensions.converting.convert import hf_to_fp8
from rlpost.models.fp8 import SIDE, SUFFIX
from rlpost.trainer.weights.quantise import FP8, dequantise
from tests.contract.families import load_folder, make_family
from tests.contract.forked.forked_sglang import ForkedSglang

pytestmark = pytest.mark.timeout(300)
FAMILY = "deepseek-v3-wide-moe"
"""Its matrices are one or several blocks, some of them partial."""
GPU_TYPES = {"h100": False, "b200": True}
"""Type of the GPUs that get the folder -> whether its scales are powers of two."""


@pytest.fixture(scope="module", autouse=True)
def log_level_and_environment() -> Iterator[None]:
    """The program sets the level of the log and CUDA_VISIBLE_DEVICES for its process, which other
    tests share.
    """
    logger = logging.getLogger("rlpost")
    level = logger.level
    with mock.patch.dict(os.environ):
        yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model in bfloat16, and in FP8 blocks for each type of GPU."""
    root = tmp_path_factory.mktemp("fp8")
    make_family(root / "source", FAMILY)
    source = root / "source"
    model = {name: one.bfloat16() for name, one in load_folder(source).items()}
    (source / "model.safetensors").unlink()
    write_in_two_files(model, source)
    for gpu_type in GPU_TYPES:
        words = ["--hf-checkpoint", str(source), "--save", str(root / gpu_type)]
        assert hf_to_fp8([*words, "--gpu-type", gpu_type]) == 0
    return root


def write_in_two_files(model: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    names = sorted(model)
    file_of = {name: f"model-{1 + (name > names[len(names) // 2])}.safetensors" for name in names}
    for file in set(file_of.values()):
        tensors = {name: model[name] for name in names if file_of[name] == file}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def compare_in_sglang(folder: Path, source: Path, powers: bool) -> list[dict[str, float]]:
    """Compare each weight in FP8 with SGLang's functions: bytes, scales, the weight they stand for."""
    from sglang.srt.layers.quantization import fp8_utils

    rows = []
    stored, weights = load_folder(folder), load_folder(source)
    for name in (name for name, one in stored.items() if one.dtype == FP8):
        weight, values, scales = weights[name], stored[name], stored[name + SUFFIX]
        back = fp8_utils.block_quant_dequant(values, scales, [SIDE, SIDE], torch.float32)
        if powers:
            own, own_scales = fp8_utils.per_block_cast_to_fp8(weight)
        else:
            own, own_scales = torch.empty_like(values), torch.empty_like(scales)
            for i, rows_of_blocks in enumerate(weight.split(SIDE, 0)):
                for j, block in enumerate(rows_of_blocks.split(SIDE, 1)):
                    place = slice(i * SIDE, (i + 1) * SIDE), slice(j * SIDE, (j + 1) * SIDE)
                    own[place], own_scales[i, j] = fp8_utils.input_to_float8(block, dtype=FP8)
        row = {
            "scales": ((own_scales - scales).abs() / scales).max().item(),
            "bytes": (own.view(torch.uint8).int() - values.view(torch.uint8)).abs().max().item(),
            "weight": (back - dequantise(values, scales, (SIDE, SIDE))).abs().max().item(),
        }
        rows.append(row)
    return rows


@pytest.mark.parametrize(("gpu_type", "powers"), GPU_TYPES.items())
def test_sglang_s_own_functions_give_the_same_blocks(
    forked: ForkedSglang, folders: Path, gpu_type: str, powers: bool
) -> None:
    """Equal bits, except that SGLang rounds 448 / amax twice: float32 scales differ by one unit in
    the last place, and values between two numbers may become the other.
    """
    source, stored = load_folder(folders / "source"), load_folder(folders / gpu_type)
    names = {name for name, one in stored.items() if one.dtype == FP8}
    rows = forked.call(compare_in_sglang, folders / gpu_type, folders / "source", powers)
    assert len(rows) == len(names) > 50
    assert max(row["weight"] for row in rows) == 0
    assert max(row["scales"] for row in rows) <= (0 if powers else 2.0**-22)
    assert max(row["bytes"] for row in rows) <= (0 if powers else 1)
    assert stored.keys() == source.keys() | {name + SUFFIX for name in names}
    assert all(torch.equal(stored[name], source[name]) for name in source.keys() - names)


def test_transformers_reads_the_weights_that_engines_compute_with(folders: Path) -> None:
    import transformers

    folder = folders / "h100"
    stored = load_folder(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    read = model.state_dict()
    # transformers 5.12 gives partial blocks another size
    names = [
        name
        for name, one in stored.items()
        if one.dtype == FP8 and name in read and not any(side % SIDE for side in one.shape)
    ]
    assert len(names) >= 3
    for name in names:
        weight = dequantise(stored[name], stored[name + SUFFIX], (SIDE, SIDE)).bfloat16()
        assert torch.equal(read[name], weight), name


def test_a_conversion_that_fails_leaves_nothing(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither a target nor a temporary folder; a quantised folder is refused before any write."""
    words = ["--hf-checkpoint", str(folders / "source"), "--save", str(tmp_path / "target")]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert hf_to_fp8(words) == 1
    assert "No space left" in capsys.readouterr().err and not [*tmp_path.iterdir()]
    again = ["--hf-checkpoint", str(folders / "h100"), "--save", str(tmp_path / "target")]
    assert hf_to_fp8(again) == 1
    assert "quantised already" in capsys.readouterr().err and not [*tmp_path.iterdir()]
    missing = ["--hf-checkpoint", str(tmp_path / "none"), "--save", str(tmp_path / "target")]
    assert hf_to_fp8(missing) == 1
    assert "config.json" in capsys.readouterr().err and not [*tmp_path.iterdir()]
