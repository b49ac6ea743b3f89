"""An update fills everything that an engine stores, in every family and in FP8.

Engines give up their weights while the trainer runs, and a parameter that the update does not send
would have undefined values afterwards (or those of ``--sglang-load-format dummy``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rlpost.trainer.weights.quantise import BlockFp8
from tests.contract.families import (
    FAMILIES,
    LATENT_MTP,
    MTP,
    SERVED,
    VARIANTS,
    load_folder,
    make_family,
)
from tests.contract.forked.engine_parameters import all_unfilled
from tests.contract.forked.forked_sglang import ForkedSglang

pytestmark = pytest.mark.timeout(300)
ALL = (*FAMILIES, *VARIANTS, *SERVED, MTP, LATENT_MTP)
DENSE_LAYER = "qwen3-moe"
"""Its second layer has no experts in the folder; SGLang builds experts, and ``rlpost check`` refuses
the model (``Family.engines_lack_dense_layers``)."""
WITHOUT_INTERVAL = {"qwen3-next-moe", "qwen3.5", "qwen3.5-moe"}
"""SGLang cannot build them; the variants with ``-even`` are those it serves."""
WITHOUT_SCALES = "llama3"
"""SGLang loads no scales of its blocks, and ``rlpost check`` refuses it
(``Family.engines_lack_fp8_scales``)."""
BLOCK = (16, 16)
IN_FP8 = ("qwen2.5", "qwen3", "qwen3-moe-served", "qwen2-moe", "glm4.5-moe")
WITH_SCALES = {"qwen2.5", "qwen2-moe"}
"""SGLang 0.5.21 gives FP8 models of these families scales of the KV cache (k_scale, v_scale).

The trainer sends none, so an engine takes 1.0, but only if memory that returns is zero
(sgl-project/sglang#30474, #32718): ``rlpost check`` refuses a cache in FP8 that would use them.
"""


def to_fp8(source: Path, folder: Path) -> None:
    """Write the model with the matrices of its layers, except routers, in FP8 blocks."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load_folder(source)
    names = {
        name
        for name, tensor in tensors.items()
        if ".layers." in name and tensor.dim() == 2 and not name.endswith("gate.weight")
    }
    fp8 = BlockFp8(frozenset(names), BLOCK)
    stored = {key: one for name in tensors for key, one in fp8.tensors(name, tensors[name]).items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    said = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))


@pytest.fixture(scope="module")
def unfilled(
    forked: ForkedSglang, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[str]]]:
    """Return what stays unfilled, by family."""
    base = tmp_path_factory.mktemp("families")
    folders: dict[str, Path] = {}
    for name in ALL:
        if name not in WITHOUT_INTERVAL:
            folders[name] = base / name
            make_family(folders[name], name)
    for name in (*IN_FP8, WITHOUT_SCALES):
        folders[f"{name} in FP8"] = base / f"{name}-fp8"
        to_fp8(folders[name], folders[f"{name} in FP8"])
    names = forked.call(all_unfilled, list(folders.values()))
    yield dict(zip(folders, names, strict=True))


@pytest.mark.parametrize("name", sorted(set(ALL) - WITHOUT_INTERVAL - {DENSE_LAYER}))
def test_an_update_fills_all_that_an_engine_stores(name, unfilled):
    assert unfilled[name] == []


def test_a_parameter_that_the_folder_lacks_is_noticed(unfilled):
    assert "model.layers.1.mlp.gate.weight" in unfilled[DENSE_LAYER]


@pytest.mark.parametrize("name", IN_FP8)
def test_in_fp8_only_the_scales_of_the_cache_are_not_filled(name, unfilled):
    found = {parameter.rpartition(".")[2] for parameter in unfilled[f"{name} in FP8"]}
    assert found == ({"k_scale", "v_scale"} if name in WITH_SCALES else set())


def test_fact_sglang_loads_no_scales_of_fp8_blocks_for_llama(unfilled):
    """When this fails, the check of that architecture can go."""
    assert any(one.endswith("weight_scale_inv") for one in unfilled[f"{WITHOUT_SCALES} in FP8"])
