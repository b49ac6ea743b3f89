"""The placement of a recipe's workers at its true number of nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.config.load import JOBS, files_of, load
from rlpost.config.tree import Config
from rlpost.driver.placement import Offer, place
from rlpost.extensions.rehearsal.nodes import (
    nodes_check,
    placement_problems,
)

RECIPES = sorted(path.stem for path in (JOBS / "recipes").glob("*.toml"))


def config_of(recipe: str, folder: Path) -> Config:
    """The settings of a recipe without its assets."""
    checkpoint = {"checkpoint": {"hf_checkpoint": str(folder)}}
    return load(files_of(JOBS / "recipes" / f"{recipe}.toml"), checkpoint).config


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_worker_of_a_recipe_is_on_its_gpus(tmp_path, recipe):
    made = nodes_check(config_of(recipe, tmp_path))
    assert made.faults == ()


def test_the_large_recipe_has_all_its_nodes(tmp_path):
    made = nodes_check(config_of("glm45_355b", tmp_path))
    assert made.extent == "8 nodes, 64 ranks, 2 engines"


def test_workers_in_other_places_are_named(tmp_path):
    config = config_of("glm45_355b", tmp_path)
    placement = place([Offer(f"node {n}", f"node {n}", 8) for n in range(8)], config)
    actors = list(placement.actors)
    actors[9], actors[40] = actors[40], actors[9]
    swapped = replace(placement, actors=tuple(actors))
    found = list(placement_problems(config, swapped))
    assert found[0] == "rank 9 is on node 5, its place is on node 1"
    assert "the tensor-parallel ranks 8 to 9 are on 2 nodes; they fit on one" in found
    assert "engine 0 uses the GPU of rank 9 from another node" in found
    engines = placement.engines[::-1]
    found = list(placement_problems(config, replace(placement, engines=engines)))
    assert found[0].startswith("engine 0 shares the GPUs of ranks [32, 33")


def test_engines_that_use_a_gpu_twice_are_named(tmp_path):
    config = config_of("qwen3_4b_async", tmp_path)
    offers = [Offer(f"node {n}", f"node {n}", 8) for n in range(config.num_nodes)]
    placement = place(offers, config)
    twice = replace(placement, engines=placement.engines * 2)
    found = list(placement_problems(config, twice))
    assert any("are used, --num-gpus-per-node is 8" in line for line in found)


def test_a_cluster_that_is_too_small_is_a_fault(tmp_path):
    config = config_of("glm45_355b", tmp_path)
    cluster = config.cluster.model_copy(update={"num_gpus_per_node": 4})
    made = nodes_check(config.model_copy(update={"cluster": cluster}))
    assert "nodes with 8 GPUs to train" in made.faults[0]
