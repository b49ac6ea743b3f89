"""What a recipe wants of the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.config.load import JOBS, files_of, load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.fetching.assets.wanted import Asset, HubFile, chosen, from_elsewhere, wanted
from tests.unit.jobs.assets import MODELS

RECIPES = sorted(path.stem for path in (JOBS / "recipes").glob("*.toml") if path.stem != "tiny")


def config(**tables: dict[str, object]) -> Config:
    return load([], tables).config


@pytest.mark.parametrize("name", RECIPES)
def test_all_that_a_recipe_reads_comes_from_the_hub_or_is_a_conversion_of_it(name, monkeypatch):
    """By the convention of last names; the converted model is one that is fetched as well."""
    monkeypatch.setenv("RLPOST_ASSETS", "/assets")
    recipe = load(files_of(JOBS / "recipes" / f"{name}.toml"), {}).config
    assets = wanted(recipe)
    folders = {asset.folder for asset in assets}
    model = Path(recipe.checkpoint.hf_checkpoint).name
    left = from_elsewhere(recipe, "/assets", assets)
    if left[:1] == (f"hf_checkpoint = /assets/{model}",):  # engines of a converted model
        model, left = model.removesuffix("-FP8"), left[1:]
    assert model in folders & MODELS.keys()
    if recipe.checkpoint.ref_load is None:
        assert not left
        return
    assert [line.removesuffix("_torch_dist") for line in left] == [
        f"ref_load = /assets/{Path(recipe.checkpoint.ref_load).name.removesuffix('_torch_dist')}"
    ]
    assert Path(recipe.checkpoint.ref_load).name.removesuffix("_torch_dist") in folders


def test_a_revision_is_part_of_a_name_and_each_repository_is_fetched_once():
    made = config(assets={"hub_models": ["a/X@v1.0", "a/X@v1.0"], "hub_datasets": "b/y"})
    assert wanted(made) == (Asset("a/X", "model", "v1.0"), Asset("b/y", "dataset"))


def test_two_repositories_of_one_last_name_are_refused():
    with pytest.raises(ConfigError, match="model a/X and dataset b/X would share the folder X"):
        wanted(config(assets={"hub_models": ["a/X"], "hub_datasets": ["b/X"]}))


@pytest.mark.parametrize(
    "bad",
    ["X", "a/b/c", "../x/y", "a/..", "https://huggingface.co/a/b", "a/b@", "a/b@../c", "-a/b"],
)
def test_what_is_no_name_of_a_repository_is_refused_on_the_login_node(bad):
    with pytest.raises(ConfigError, match=r"--hub-models .*write ORGANISATION/NAME"):
        config(assets={"hub_models": [bad]})


def test_without_safetensors_other_weight_formats_are_kept():
    files = [HubFile("pytorch_model.bin", 1, "git:0"), HubFile("config.json", 1, "git:0")]
    assert chosen(files) == tuple(files)
