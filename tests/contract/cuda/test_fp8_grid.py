"""Trainer and engines round weights to one grid of FP8 blocks, by TransformerEngine's own source."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from rlpost.trainer import fp8_grid
from tests.contract.cuda.engine_source import engine_source

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
    assert powers == fp8_grid.has_powers_of_two(capability) == (capability == BLACKWELL)
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
