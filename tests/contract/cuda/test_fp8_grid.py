"""Trainer and engines round weights to one grid of FP8 blocks, by TransformerEngine's own source.

One table for every GPU, ``--fp8-recipe``, checkpoint and cache of the engines: what ``rlpost check``
accepts has equal bits on both sides, and all else is refused by name.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from rlpost.config.checks.engine_model import engine_model_problems
from rlpost.config.checks.precision import precision_problems
from rlpost.config.groups.perf import FP8_ROWS
from rlpost.config.load import load
from rlpost.config.plan.cards import capability_of
from rlpost.engines.blackwell import DENSE, TRITON, updatable_kernels
from rlpost.models import fp8
from rlpost.trainer import fp8_grid
from rlpost.trainer.weights.quantise import BlockFp8
from tests.contract.cuda.engine_source import engine_source
from tests.unit.config.test_models import PUBLISHED
from tests.unit.trainer.weights.test_quantise import block_by_block

PATH = "transformer_engine/common/recipe/__init__.py"
HOPPER, BLACKWELL = (9, 0), (10, 3)


def recipes_of(environ: Mapping[str, str]) -> SimpleNamespace:
    """Return the module of recipes as it is imported with an environment."""
    source = engine_source()
    parameters = source.run(PATH, "QParams").__annotations__
    recipe = source.run(
        PATH,
        "Float8BlockScaling",
        os=SimpleNamespace(getenv=lambda name, default: environ.get(name, default)),
        QParams=lambda **given: SimpleNamespace(**{name: given.get(name) for name in parameters}),
        MMParams=SimpleNamespace,
        Format=SimpleNamespace(E4M3=None),
        Recipe=object,
    )
    return SimpleNamespace(Float8BlockScaling=recipe)


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("inherited", [None, "0", "1"])
def test_products_of_a_rank_have_the_scales_that_engines_get(monkeypatch, capability, inherited):
    monkeypatch.setattr(fp8_grid, "read_capability", lambda: capability)
    environ = {fp8_grid.USED: "1"}
    if inherited is not None:
        environ[fp8_grid.VARIABLE] = inherited
    fp8_grid.prepare(environ)
    recipes = recipes_of(environ)
    powers = recipes.Float8BlockScaling.fp8_quant_fwd_weight.power_2_scale
    assert powers == fp8.has_powers_of_two(capability) == (capability == BLACKWELL)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    assert fp8_grid.grid_problem(capability) is None
    other = HOPPER if capability == BLACKWELL else BLACKWELL
    assert fp8_grid.VARIABLE in fp8_grid.grid_problem(other)


@pytest.mark.parametrize("environ", [{}, {fp8_grid.USED: "0"}])
def test_other_ranks_keep_their_environment(monkeypatch, environ):
    monkeypatch.setattr(fp8_grid, "read_capability", lambda: HOPPER)
    before = dict(environ)
    fp8_grid.prepare(environ)
    assert environ == before


def test_a_node_without_nvml_keeps_the_value_and_the_rank_checks_it(monkeypatch):
    monkeypatch.setattr(fp8_grid, "read_capability", lambda: None)
    environ = {fp8_grid.USED: "1"}
    fp8_grid.prepare(environ)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes_of(environ))
    problem = fp8_grid.grid_problem(HOPPER)
    assert f"{fp8_grid.VARIABLE}={os.environ.get(fp8_grid.VARIABLE, '(unset)')}" in problem
    assert fp8_grid.grid_problem(None) is None


GPU_TYPES = ("a100", "l40s", "h100", "h200", "b200", "gb300", "rtx_pro_6000")
TRAINS = {"h100", "h200", "b200", "gb300"}
"""GPUs on which products in FP8 and engines can have the same weights."""
BLOCKS = fp8.quantization_config([])
CHECKPOINTS = {
    "bfloat16": None,
    "blocks": BLOCKS,
    "blocks of another size": BLOCKS | {"weight_block_size": [1, 32]},
    "without shared experts": fp8.quantization_config(
        ["model.layers.3.mlp.shared_experts.up_proj"]
    ),
}
CACHES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")
ROWS = list(itertools.product(GPU_TYPES, FP8_ROWS, CHECKPOINTS, CACHES))


def check(gpu_type: str, recipe: str, checkpoint: str, cache: str) -> list[str]:
    """Return what ``rlpost check`` says of FP8 on both sides."""
    settings = {
        "checkpoint": {"hf_checkpoint": "/model"},
        "cluster": {"gpu_type": gpu_type},
        "megatron": {"fp8": "e4m3", "fp8_recipe": recipe},
        "sglang": {"sglang_kv_cache_dtype": cache},
    }
    config = load([], settings).config
    model = dict(PUBLISHED["qwen3_4b"])
    if quantised := CHECKPOINTS[checkpoint]:
        model["quantization_config"] = quantised
    engines = engine_model_problems(config, model, longest=1, ignored_window=None)
    return [*precision_problems(config), *engines]


@pytest.mark.parametrize("gpu_type", GPU_TYPES)
def test_products_round_to_the_bits_of_the_engines_or_are_refused(monkeypatch, gpu_type):
    accepted = set()
    for row in (row for row in ROWS if row[0] == gpu_type):
        lines = check(*row)
        if not lines:
            accepted.add(row[1:])
        assert all("; " in line and line.startswith("--") for line in lines), "flag and remedy"
    whole = {(fp8.BLOCKWISE, "blocks", cache) for cache in ("auto", "bfloat16")}
    assert accepted == (whole if gpu_type in TRAINS else set())
    if not accepted:
        return
    capability = capability_of(gpu_type)
    monkeypatch.setattr(fp8_grid, "read_capability", lambda: capability)
    environ = {fp8_grid.USED: "1"}
    fp8_grid.prepare(environ)
    powers = recipes_of(environ).Float8BlockScaling.fp8_quant_fwd_weight.power_2_scale
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(7)).bfloat16()
    rounded, scales = block_by_block(weight, (fp8.SIDE, fp8.SIDE), has_powers_of_two=powers)
    update = BlockFp8({"w"}, has_powers_of_two=fp8.has_powers_of_two(capability))
    sent = update.tensors("w", weight)
    assert torch.equal(sent["w"].view(torch.uint8), rounded.view(torch.uint8))
    assert sent["w" + fp8.SUFFIX].dtype == torch.float32
    assert torch.equal(sent["w" + fp8.SUFFIX], scales)
    assert powers == bool((scales.view(torch.int32) & 0x7FFFFF == 0).all())
    kernels = updatable_kernels({}, {"quantization_config": BLOCKS}, capability)
    assert kernels == ({DENSE: TRITON} if powers else {}), "which keep the layout and the scales"


def test_a_gpu_without_the_products_or_the_blocks_is_named():
    lines = check("b200", "mxfp8", "blocks", "auto")
    assert len(lines) == 1 and "--fp8-recipe mxfp8: the trainer's products would round" in lines[0]
    (first, second) = check("a100", "blockwise", "blocks", "auto")
    assert first.startswith("--fp8-recipe blockwise with --gpu-type a100: TransformerEngine has no")
    assert "SGLang repacks weights in FP8 for kernels of sm80" in second
    (line,) = check("l40s", "blockwise", "blocks", "auto")
    assert "use --fp8-recipe tensorwise, or leave --fp8 out" in line
    (line,) = check("h100", "blockwise", "blocks", "fp8_e4m3")
    assert "--sglang-kv-cache-dtype fp8_e4m3: the trainer's attention does not round" in line
    (line,) = check("h100", "blockwise", "without shared experts", "auto")
    assert "would round shared experts" in line
