"""What is read from config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.actor.description import MODEL_SPECS, read_description
from rlpost.errors import ConfigError, WeightError
from rlpost.weights.names import FAMILIES, Dimensions

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}


def folder_with(folder: Path, **changes) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def test_every_family_that_is_built_has_names_for_its_weights():
    assert MODEL_SPECS.keys() == FAMILIES.keys()


def test_the_head_dimension_follows_from_the_hidden_size_unless_given(tmp_path):
    assert read_description(folder_with(tmp_path)).dims == Dimensions(2, 16, 97)
    assert read_description(folder_with(tmp_path, head_dim=32)).dims == Dimensions(2, 32, 97)


def test_the_rope_base_is_found_where_either_version_of_transformers_writes_it(tmp_path):
    assert read_description(folder_with(tmp_path)).rope_theta == 1e6
    assert read_description(folder_with(tmp_path, rope_parameters=None, rope_theta=5e5)).rope_theta == 5e5


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn"}},
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
    ],
)
def test_an_option_the_model_here_does_not_have_is_refused(tmp_path, change):
    key = "rope_type" if "rope_parameters" in change else next(iter(change))
    with pytest.raises(WeightError, match=rf"config\.json: {key}=.* is not supported"):
        read_description(folder_with(tmp_path, **change))


def test_an_unknown_architecture_is_named_with_those_known(tmp_path):
    with pytest.raises(WeightError, match=r"'LlamaForCausalLM' is not known; known: .*Qwen3ForCausalLM"):
        read_description(folder_with(tmp_path, architectures=["LlamaForCausalLM"]))


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(WeightError, match=r"has no config\.json"):
        read_description(tmp_path)


def test_a_tensor_parallel_size_that_does_not_divide_is_refused_with_the_numbers(tmp_path):
    description = read_description(folder_with(tmp_path))
    description.check_tensor_parallel(2)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=4 does not divide num_key_value_heads=2"):
        description.check_tensor_parallel(4)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 96, 97])
def test_the_valid_columns_of_all_ranks_are_the_vocabulary(tmp_path, tp_size):
    description = read_description(folder_with(tmp_path))
    columns = [description.num_valid_columns(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    assert sum(columns) == 97 and columns == sorted(columns, reverse=True)
