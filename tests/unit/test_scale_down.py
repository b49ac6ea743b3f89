"""Recipes in small: what shrinks, what stays, and that the result has nothing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.config.checks.algorithm import algorithm_problems
from rlpost.config.checks.batch import batch_problems
from rlpost.config.checks.layout import layout_problems, model_problems
from rlpost.config.checks.rollout import rollout_problems
from rlpost.config.load import JOBS, files_of, load
from rlpost.config.plan.architecture import architecture
from rlpost.config.plan.shape import Layout, layout_of
from rlpost.config.tree import Config
from rlpost.models.families import family
from rlpost.models.model_types import HfConfig
from tests.scale_down import PROMPTS, folded, published_model, scale_down, scaled_model

FOLDER = Path("/scaled")
RECIPES = sorted(path.stem for path in (JOBS / "recipes").glob("*.toml") if path.stem != "tiny")
SHRINKS = {  # what may be another value than in the recipe; all that is not here stays
    "perf": {"tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
             "context_parallel_size", "expert_model_parallel_size", "max_tokens_per_gpu",
             "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"},
    "cluster": {"nodes", "num_gpus_per_node", "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus",
                "rollout_num_gpus_per_engine", "ray_object_store_memory"},
    "sglang": {"sglang_enable_dp_attention", "sglang_enable_dp_lm_head", "sglang_dp_size", "sglang_ep_size",
               "sglang_moe_dense_tp_size"},
    "rollout": {"rollout_batch_size", "over_sampling_batch_size", "global_batch_size", "rollout_max_response_len",
                "rollout_max_prompt_len", "prompt_data", "input_key", "label_key",
                "rollout_stop_token_ids", "rm_type", "custom_rm_path"},
    "eval": {"eval_max_response_len", "eval_prompt_data"},
    "checkpoint": {"hf_checkpoint", "ref_load", "model"},
    "engines": {"judge", "teacher"},
}  # fmt: skip


def recipe(name: str, **flags: dict[str, object]) -> Config:
    return load(files_of(JOBS / "recipes" / f"{name}.toml"), flags).config


def small(name: str, ranks: int) -> Config:
    return scale_down(recipe(name), FOLDER, ranks=ranks)


def small_model(name: str, ranks: int) -> HfConfig:
    config = recipe(name)
    return scaled_model(published_model(config), folded(layout_of(config), ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_in_small_has_nothing_wrong(name, ranks):
    made, hf = small(name, ranks), small_model(name, ranks)
    assert (
        layout_problems(made)
        == batch_problems(made)
        == rollout_problems(made)
        == algorithm_problems(made)
        == []
    )
    assert model_problems(made, hf) == []
    assert 1 <= made.actor_world_size <= ranks and made.num_nodes == 1
    assert 1 <= made.num_engines <= 2
    assert made.rollout.rollout_batch_size <= PROMPTS


@pytest.mark.parametrize("name", RECIPES)
def test_algorithm_and_rollout_are_the_recipe_s(name):
    """Every setting of every table but those that shrink, and those that go with the model, is
    untouched.
    """
    before, after = recipe(name), small(name, 2)
    for group in Config.model_fields:
        old, new = dict(getattr(before, group)), dict(getattr(after, group))
        changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
        assert changed <= SHRINKS.get(group, set()), group
    assert after.num_steps_per_rollout == before.num_steps_per_rollout
    assert (after.cluster.colocate, after.offload_train) == (
        before.cluster.colocate,
        before.offload_train,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_in_small_has_the_features_of_its_family(name):
    """The same architecture; dense layers before sparse ones, grouped queries, some of many
    experts.
    """
    large, little = published_model(recipe(name)), small_model(name, 4)
    assert large["architectures"] == little["architectures"]
    said = [architecture(family(each["architectures"][0]), each) for each in (large, little)]
    before, after = said
    switches = [
        {key: value for key, value in each.items() if isinstance(value, bool | str)}
        for each in said
    ]
    assert switches[0] == switches[1]
    assert said[0]["rotary_percent"] == said[1]["rotary_percent"]
    assert after["num_query_groups"] < after["num_attention_heads"]
    if before.get("num_experts"):
        assert set(after["moe_layer_freq"]) == set(before["moe_layer_freq"])
        assert 1 < after["moe_router_topk"] < after["num_experts"]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (64, Layout(64, 2, 8, 2, 8, 1, True)),
        (32, Layout(32, 2, 4, 2, 8, 1, True)),
        (8, Layout(8, 2, 2, 2, 4, 1, True)),
        (4, Layout(4, 2, 2, 1, 2, 1, True)),
        (2, Layout(2, 2, 1, 1, 2, 1, True)),
        (1, Layout(1, 1, 1, 1, 1, 1, False)),
    ],
)
def test_sizes_are_halved_in_order_and_stay_two_as_long_as_there_is_room(ranks, expected):
    assert folded(layout_of(recipe("glm45_355b")), ranks) == expected


def test_data_parallelism_goes_first():
    assert folded(Layout(16, tensor=2, context=2), 8).data == 2
    assert folded(Layout(16, tensor=2, context=2), 4) == Layout(4, tensor=2, context=2)
    assert folded(Layout(6, tensor=2), 4).data == 2


@pytest.mark.parametrize("number", [1, 3])
def test_a_given_number_of_engine_gpus_stays_and_each_has_an_engine(number):
    config = recipe("qwen3_4b_async", cluster={"rollout_num_gpus": number})
    assert config.cluster.rollout_num_gpus_per_engine == 2
    made = scale_down(config, FOLDER, ranks=2, kept={"cluster.rollout_num_gpus"})
    assert (made.rollout_num_gpus, made.num_engines, made.num_nodes) == (number, number, 1)
    assert layout_problems(made) == []


def test_engines_of_fp8_have_another_folder_and_training_begins_from_the_model():
    made = small("qwen3_4b_fp8", 2).checkpoint
    assert (made.hf_checkpoint, made.ref_load) == (
        str(FOLDER / "model-FP8"),
        str(FOLDER / "model"),
    )
