"""An update fills everything that an engine stores, in every family and in FP8.

Engines give up their weights while the trainer runs, and a parameter that the update does not send
would have undefined values afterwards (or those of ``--sglang-load-format dummy``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from rlpost.extensions.converting.fp8_folder import write_fp8_folder
from rlpost.models import families
from tests.contract.families import (
    FAMILIES,
    LATENT_MTP,
    MTP,
    SERVED,
    VARIANTS,
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
WITHOUT_SCALES, LLAMA_3 = "llama3", "LlamaForCausalLM"
"""SGLang loads no scales of its blocks, and ``rlpost check`` refuses it
(``Family.engines_lack_fp8_scales``)."""
BLOCK = (16, 16)
IN_FP8 = (
    *("qwen2.5", "qwen3", "qwen3-moe-served", "qwen2-moe", "glm4-0414", "glm4.5-moe"),
    *("minimax-m2-moe", "deepseek-v3-wide-moe", "qwen3-next-even-moe", "qwen3.5-even-moe"),
)
WITHOUT_CACHE_SCALES = {"qwen3", "qwen3-moe-served", "glm4.5-moe"}
"""SGLang 0.5.21 gives FP8 models of other families scales of the KV cache (k_scale, v_scale).

The trainer sends none, so an engine takes 1.0, but only if memory that returns is zero
(sgl-project/sglang#30474, #32718): ``rlpost check`` refuses a cache in FP8 that would use them.
"""


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
    loaded = replace(families.FAMILIES[LLAMA_3], engines_lack_fp8_scales=False)
    for name in (*IN_FP8, WITHOUT_SCALES):
        folders[f"{name} in FP8"] = base / f"{name}-fp8"
        with mock.patch.dict(families.FAMILIES, {LLAMA_3: loaded}):
            write_fp8_folder(folders[name], folders[f"{name} in FP8"], block=BLOCK)
    names = forked.call(all_unfilled, list(folders.values()))
    yield dict(zip(folders, names, strict=True))


@pytest.mark.parametrize("name", sorted(set(ALL) - WITHOUT_INTERVAL - {DENSE_LAYER}))
def test_an_update_fills_all_that_an_engine_stores(name, unfilled):
    assert unfilled[name] == []


def test_a_parameter_that_the_folder_lacks_is_noticed(unfilled):
    assert "model.layers.1.mlp.gate.weight" in unfilled[DENSE_LAYER]


@pytest.mark.parametrize("name", IN_FP8)
def test_in_fp8_only_the_scales_of_the_cache_are_not_filled(name, unfilled):
    names = unfilled[f"{name} in FP8"]
    found = {parameter.rpartition(".")[2] for parameter in names}
    assert found == (set() if name in WITHOUT_CACHE_SCALES else {"k_scale", "v_scale"}), names


def test_fact_sglang_loads_no_scales_of_fp8_blocks_for_llama(unfilled):
    """When this fails, the check of that architecture can go."""
    assert any(one.endswith("weight_scale_inv") for one in unfilled[f"{WITHOUT_SCALES} in FP8"])
