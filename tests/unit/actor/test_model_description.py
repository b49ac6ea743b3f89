"""What is read from config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.actor.model_description import read_description
from rlpost.actor.settings import ActorSettings
from rlpost.errors import ConfigError, WeightError
from rlpost.weights.names import Dimensions

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}


def folder_with(folder: Path, **changes) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def test_the_head_dimension_follows_from_the_hidden_size_unless_given(tmp_path):
    assert read_description(folder_with(tmp_path)).dims == Dimensions(2, 16, 97)
    assert read_description(folder_with(tmp_path, head_dim=32)).dims == Dimensions(2, 32, 97)


def test_the_rope_base_is_found_where_either_version_of_transformers_writes_it(tmp_path):
    assert read_description(folder_with(tmp_path)).rope_theta == 1e6
    assert (
        read_description(folder_with(tmp_path, rope_parameters=None, rope_theta=5e5)).rope_theta
        == 5e5
    )


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
    with pytest.raises(
        WeightError, match=r"'MixtralForCausalLM' is not known; known: .*Qwen3ForCausalLM"
    ):
        read_description(folder_with(tmp_path, architectures=["MixtralForCausalLM"]))


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(WeightError, match=r"has no config\.json"):
        read_description(tmp_path)


def test_a_file_that_is_cut_off_or_lacks_what_its_family_needs_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG)[:40])
    with pytest.raises(WeightError, match=r"config\.json: not valid JSON"):
        read_description(tmp_path)
    with pytest.raises(
        WeightError, match=r"config\.json: has no 'num_.*experts', which Qwen3MoeForCausalLM needs"
    ):
        read_description(folder_with(tmp_path, architectures=["Qwen3MoeForCausalLM"]))


def test_keys_that_a_model_cannot_be_built_without_are_named_before_it_is(tmp_path):
    """transformers fills some of them in; here nothing is guessed."""
    old = {
        key: value
        for key, value in CONFIG.items()
        if key not in ("rope_parameters", "num_key_value_heads")
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(WeightError, match=r"config\.json: has no rope_theta, num_key_value_heads"):
        read_description(tmp_path)


@pytest.mark.parametrize(("layers", "chunks"), [(1, 2), (2, None), (None, None)])
def test_stages_of_a_single_chunk_are_not_interleaved(tmp_path, layers, chunks):
    """As Megatron-LM has it: its interleaved schedule takes a list of chunks only."""
    layout = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": layers}
    assert (
        read_description(folder_with(tmp_path)).num_virtual_stages(ActorSettings("", **layout))
        == chunks
    )


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 30,
}


@pytest.mark.parametrize(
    ("config", "layout", "said"),
    [
        (
            {},
            {"tensor_model_parallel_size": 4},
            "tensor_model_parallel_size=4 does not divide num_key_value_heads=2",
        ),
        (
            {},
            {"pipeline_model_parallel_size": 3},
            "pipeline_model_parallel_size=3 does not divide num_hidden_layers=4",
        ),
        ({}, {"expert_model_parallel_size": 2}, "has no experts"),
        (
            MOE,
            {"expert_model_parallel_size": 3},
            "expert_model_parallel_size=3 does not divide number of experts=8",
        ),
        (
            MOE,
            {"expert_tensor_parallel_size": 4},
            "expert_tensor_parallel_size=4 does not divide moe_intermediate_",
        ),
        (
            MOE,
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
            "need sequence_parallel",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_with_the_numbers(
    tmp_path, config, layout, said
):
    description = read_description(folder_with(tmp_path, **config))
    description.check_layout(ActorSettings(""))
    with pytest.raises(ConfigError, match=said):
        description.check_layout(ActorSettings("", **layout))


def test_llama_3_1_frequencies_are_known_and_others_are_not(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    llama = {"architectures": ["LlamaForCausalLM"]}
    known = rope | {"original_max_position_embeddings": 8192}
    assert (
        read_description(folder_with(tmp_path, **llama, rope_parameters=known)).rope_factor == 8.0
    )
    older = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": known}
    assert read_description(folder_with(tmp_path, **llama, **older)).rope_factor == 8.0
    named_as_of_old = {key: value for key, value in known.items() if key != "rope_type"} | {
        "type": "llama3"
    }
    oldest = older | {"rope_scaling": named_as_of_old}
    assert read_description(folder_with(tmp_path, **llama, **oldest)).rope_factor == 8.0
    with pytest.raises(WeightError, match="rope_type='llama3' is not supported"):
        read_description(
            folder_with(tmp_path, **llama, rope_parameters=rope | {"low_freq_factor": 2.0})
        )


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 96, 97])
def test_the_valid_columns_of_all_ranks_are_the_vocabulary(tmp_path, tp_size):
    description = read_description(folder_with(tmp_path))
    columns = [
        description.num_valid_columns(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)
    ]
    assert sum(columns) == 97 and columns == sorted(columns, reverse=True)


HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (HYBRID, {"context_parallel_size": 2}, "--context-parallel-size 2: the linear attention"),
        (HYBRID, {"tensor_model_parallel_size": 2}, "does not divide linear_num_key_heads = 3"),
        (GPT_OSS, {"tensor_model_parallel_size": 2}, "use --expert-tensor-parallel-size 1"),
    ],
)
def test_a_layout_that_a_model_rules_out_is_refused(tmp_path, model, layout, message):
    description = read_description(folder_with(tmp_path, **model))
    with pytest.raises(ConfigError, match=message):
        description.check_layout(ActorSettings(str(tmp_path), sequence_parallel=True, **layout))


def test_linear_layers_follow_from_the_interval_of_older_configurations(tmp_path):
    older = {key: value for key, value in HYBRID.items() if key != "layer_types"}
    folder = folder_with(tmp_path, **older, full_attention_interval=4)
    assert read_description(folder).fields["linear_attention_freq"] == [1, 1, 1, 0]


def test_the_scaling_of_yarn_must_be_the_one_that_megatron_computes(tmp_path):
    rope = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}
    with pytest.raises(WeightError, match="rope_type='yarn' is not supported"):
        read_description(folder_with(tmp_path, **GPT_OSS, rope_parameters=rope))
