"""Hugging Face to torch_dist and back, bit for bit.

Every family at two layouts, and the command-line tools.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from rlpost.durable.commit import begin, commit
from rlpost.durable.provenance import PROVENANCE_FILE, Provenance
from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.extensions.converting.convert import torch_dist_to_hf
from rlpost.models.rope import rope
from tests.contract.actor_ranks import in_processes, look, run_ranks
from tests.contract.conversion_ranks import Conversion, convert
from tests.contract.families import FAMILIES, MTP, load_folder, make_family
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]

TP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
UNEVEN: dict[str, Any] = PP | {"decoder_last_pipeline_num_layers": 1}
EP: dict[str, Any] = {"expert_model_parallel_size": 2}
# (there, back); all other families use (TP, UNEVEN)
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-tied": (UNEVEN, TP),
    "qwen3-moe": (EP, UNEVEN),
    "glm4.5-moe": (UNEVEN, EP),
    "qwen2-moe": (TP, EP),
    "gpt-oss-moe": (EP, UNEVEN),
    MTP: (UNEVEN, EP),
    "llama3.1": ({}, PP | {"num_layers_per_virtual_pipeline_stage": 1}),
}
NAMES = (*FAMILIES, MTP)


def add_extra_layer(folder: Path) -> None:
    """Add tensors after the last layer, as GLM-4.5 has them for multi-token prediction."""
    file = folder / "model.safetensors"
    names = ("eh_proj", "enorm", "self_attn.q_proj", "shared_head.norm")
    extra = {f"model.layers.4.{name}.weight": torch.randn(7, 5).bfloat16() for name in names}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversion")
    for name in NAMES:
        make_family(folder / name, name)
    add_extra_layer(folder / "glm4.5-moe")
    convert(
        [Conversion(name, *LAYOUTS.get(name, (TP, UNEVEN))) for name in NAMES],
        str(folder),
        num_ranks=2,
    )
    return folder


def same_tensors(ours: Path, theirs: Path) -> bool:
    found, expected = load_folder(ours), load_folder(theirs)
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", NAMES)
def test_weights_survive_a_checkpoint_read_at_another_layout_bit_for_bit(converted, name):
    """Includes tensors that are not trained.

    They are a layer for multi-token prediction that config.json does not mention.
    """
    assert same_tensors(converted / f"{name}_back", converted / name)
    assert (
        converted / f"{name}_torch_dist" / "latest_checkpointed_iteration.txt"
    ).read_text() == "release"


def test_a_converted_model_has_the_layer_for_multi_token_prediction(converted):
    """A run may then train the layer or not. Its keys are those of Megatron-LM."""
    kept = {name: find_checkpoint(converted / f"{name}_torch_dist") for name in (MTP, "glm4.5-moe")}
    keys = {
        name: set(FileSystemReader(folder).read_metadata().state_dict_metadata)
        for name, folder in kept.items()
    }
    assert {key.split(".")[0] for key in keys[MTP] - keys["glm4.5-moe"]} == {"mtp"}
    assert "mtp.layers.0.transformer_layer.mlp.router.expert_bias" in keys[MTP]


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_run_starts_from_a_converted_model_with_and_without_that_layer(
    converted, tmp_path, is_trained
):
    settings = rank_config(
        str(converted / MTP),
        ref_load=str(converted / f"{MTP}_torch_dist"),
        enable_mtp_training=is_trained,
    )
    run_ranks(look, 1, settings, samples=STEPS[0], export=str(tmp_path / "out"))
    assert same_tensors(tmp_path / "out", converted / MTP)


def test_a_run_starts_from_the_reference_checkpoint(converted, tmp_path):
    """--ref-load takes precedence over the weights of --hf-checkpoint.

    The configuration and the tokenizer of the latter are still used.
    """
    other = tmp_path / "other"
    make_family(other, "qwen3")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors")
    settings = rank_config(
        str(other), ref_load=str(converted / "qwen3_torch_dist"), use_kl_loss=True
    )
    run_ranks(look, 1, settings, samples=STEPS[0], export=str(tmp_path / "out"))
    assert same_tensors(tmp_path / "out", converted / "qwen3")


def test_the_tools_convert_under_torchrun_with_arguments_of_megatron(converted, tmp_path):
    """By default layers are distributed over the ranks.

    An argument that contradicts config.json is an error that names both values.
    """
    original, kept, back = str(converted / "qwen3"), str(tmp_path / "kept"), str(tmp_path / "back")
    words = [
        "--num-layers",
        "4",
        "--hidden-size",
        "64",
        "--swiglu",
        "--qk-layernorm",
        "--disable-bias-linear",
    ]
    there = [
        "-m",
        "rlpost",
        "convert",
        "to-torch-dist",
        *words,
        "--hf-checkpoint",
        original,
        "--save",
        kept,
    ]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*launcher, *there], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert f"{kept}: written in" in done.stdout and "by 2 ranks" in done.stdout
    assert "parameters of this rank" in done.stderr
    tool = [sys.executable, str(ROOT / "tools/convert_torch_dist_to_hf.py")]
    places = ["--input-dir", kept, "--output-dir", back, "--origin-hf-dir", original]
    done = subprocess.run([*tool, *places], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert same_tensors(Path(back), Path(original))
    ((code, said),) = in_processes(refused, [([*places, "--num-layers", "5"],)])
    assert code == 1 and "--num-layers 5" in said and "says 4" in said


def test_a_damaged_checkpoint_is_not_exported_and_an_export_has_the_settings_of_its_run(
    converted, tmp_path
):
    """A blank block, as storage that crashed leaves it; torch reads it as zeros."""
    model, saves = tmp_path / "model", tmp_path / "saves"
    shutil.copytree(converted / "qwen3", model)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 1 << 24}
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    writing = begin(saves, 1)
    shutil.copytree(find_checkpoint(converted / "qwen3_torch_dist"), writing, dirs_exist_ok=True)
    of_run = {"image_max_pixels": 1 << 18, "override_hf_config": {"rotary_base": 77.0}}
    (writing / PROVENANCE_FILE).write_text(Provenance(of_run).to_json())
    checkpoint = commit(writing)
    out = tmp_path / "out"
    words = ["--input-dir", checkpoint, "--output-dir", out, "--origin-hf-dir", model]
    ((code, said),) = in_processes(refused, [(list(map(str, words)),)])
    assert code == 0, said
    assert same_tensors(out, model)
    exported = json.loads((out / "preprocessor_config.json").read_text())
    assert exported["max_pixels"] == exported["size"]["longest_edge"] == 1 << 18
    assert rope(json.loads((out / "config.json").read_text()))["rope_theta"] == 77.0
    weights = load_folder(model)["model.norm.weight"].view(torch.uint8).numpy().tobytes()
    files = {path: path.read_bytes() for path in checkpoint.glob("*.distcp")}
    file, content = next(each for each in files.items() if weights in each[1])
    file.write_bytes(content.replace(weights, bytes(len(weights))))
    words[3] = tmp_path / "damaged"
    ((code, said),) = in_processes(refused, [(list(map(str, words)),)])
    assert code == 1 and f"{file.name} is damaged" in said
    assert not words[3].exists()


def refused(pipe: Connection, words: list[str]) -> None:
    """Send the exit code and the errors of the tool, from a process that has imported Megatron."""
    with redirect_stderr(StringIO()) as said:
        code = torch_dist_to_hf(words)
    pipe.send((True, (code, said.getvalue())))
