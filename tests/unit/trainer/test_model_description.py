"""Reading config.json, and the options that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.config.model_file import read_model
from rlpost.config.plan.architecture import layers_problem
from rlpost.errors import ConfigError, WeightError
from rlpost.models.families import family
from rlpost.models.names import Dimensions
from rlpost.trainer.model_description import read_description
from tests.settings import rank_config
from tests.unit.config.test_models import PUBLISHED

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
    qwen2 = {"architectures": ["Qwen2ForCausalLM"]}
    assert read_description(folder_with(tmp_path, **qwen2)).dims == Dimensions(2, 16, 97)
    assert read_description(folder_with(tmp_path, head_dim=32)).dims == Dimensions(2, 32, 97)
    # the default of Qwen3Config
    assert read_description(folder_with(tmp_path)).dims == Dimensions(2, 128, 97)


def test_the_rope_base_is_found_where_either_version_of_transformers_writes_it(tmp_path):
    older = {"rope_parameters": None, "rope_theta": 5e5}
    assert read_description(folder_with(tmp_path)).rope["rope_theta"] == 1e6
    assert read_description(folder_with(tmp_path, **older)).rope["rope_theta"] == 5e5


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 4.0}},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "longrope"}},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
    ],
)
def test_an_unsupported_option_is_refused(tmp_path, change):
    key = "rope_type" if "rope_parameters" in change else next(iter(change))
    with pytest.raises(WeightError, match=rf"config\.json: {key}=.* is not supported"):
        read_description(folder_with(tmp_path, **change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings = "false"; it must be true or false'),
        ({"use_sliding_window": 1}, "use_sliding_window = 1; it must be true or false"),
        ({"hidden_size": "64"}, 'hidden_size = "64"; it must be an integer of at least 1'),
        ({"hidden_size": 64.0}, "hidden_size = 64.0; it must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers = true; it must be an integer"),
        ({"head_dim": 0}, "head_dim = 0; it must be an integer of at least 1"),
        ({"rms_norm_eps": "1e-6"}, 'rms_norm_eps = "1e-6"; it must be a number above 0'),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN; it must be a number above 0"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, 'rope_theta = "1e6"; it must be a number'),
        ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "rope_theta = 0; it must be"),
        ({"rope_parameters": [1]}, "rope_parameters = .1.; it must be an object or null"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_one_of_its_key_is_refused(tmp_path, change, reason):
    """A text that is not empty is true, also "false": the output layer would be tied."""
    with pytest.raises(WeightError, match=rf"config\.json: {reason}"):
        read_description(folder_with(tmp_path, **change))


@pytest.mark.parametrize("text", ["[]", '"a"', '{"a":' * 100_000, "{"], ids=range(4))
def test_what_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightError, match=r"config\.json: not (valid JSON|a JSON object)"):
        read_description(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: not (valid JSON|a JSON object)"):
        read_model(tmp_path / "config.json")


FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": [FULL] * 5}, "layer_types has 5 layers and num_hidden_layers = 4"),
        ({"layer_types": [FULL] * 3}, "layer_types has 3 layers"),
        ({"layer_types": []}, "layer_types has 0 layers"),
        ({"layer_types": [FULL, FULL, "chunked_attention", FULL]}, "'chunked_attention' for layer 2"),
        ({"layer_types": [LINEAR, FULL, FULL, FULL]}, f"{LINEAR!r} for layer 0, .* computed as {FULL!r}"),
        (
            {"architectures": ["LlamaForCausalLM"], "layer_types": [FULL, WINDOW] * 2},
            f"{WINDOW!r} for layer 1, .* computed as {FULL!r}",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 0, "layer_types": [WINDOW] * 4},
            "sliding_window = 0 with layers that have a window",
        ),
    ],
)  # fmt: skip
def test_layers_that_would_be_computed_otherwise_are_refused(tmp_path, change, reason):
    """Megatron reads a list of another length without a word, and takes other kinds for full."""
    with pytest.raises(WeightError, match=reason):
        read_description(folder_with(tmp_path, **change))
    windows = {"use_sliding_window": True, "sliding_window": 4, "layer_types": [FULL, WINDOW] * 2}
    assert read_description(folder_with(tmp_path, **windows)).fields["window_attn_skip_freq"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layers_are_computed_as_they_are_described(name):
    hf = PUBLISHED[name]
    known = family(hf["architectures"][0])
    hf = known.resolved(hf)
    assert layers_problem(hf, known.fields(hf)) is None


def test_an_unknown_architecture_is_named_with_those_known(tmp_path):
    with pytest.raises(
        WeightError, match=r"'MixtralForCausalLM' is not known; known: .*Qwen3ForCausalLM"
    ):
        read_description(folder_with(tmp_path, architectures=["MixtralForCausalLM"]))


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(WeightError, match=r"has no config\.json"):
        read_description(tmp_path)


def test_a_truncated_or_incomplete_config_is_reported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG)[:40])
    with pytest.raises(WeightError, match=r"config\.json: not (valid JSON|a JSON object)"):
        read_description(tmp_path)
    with pytest.raises(
        WeightError, match=r"config\.json: has no 'num_.*experts', which Qwen3MoeForCausalLM needs"
    ):
        read_description(folder_with(tmp_path, architectures=["Qwen3MoeForCausalLM"]))


def test_missing_required_keys_are_reported(tmp_path):
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
        read_description(folder_with(tmp_path)).num_virtual_stages(rank_config("", **layout))
        == chunks
    )


LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
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
            "tensor-model-parallel-size 4 does not divide num_key_value_heads = 2",
        ),
        (
            {},
            {"pipeline_model_parallel_size": 3},
            "pipeline-model-parallel-size 3 does not divide num_hidden_layers = 4",
        ),
        ({}, {"expert_model_parallel_size": 2}, "has no experts"),
        (
            MOE,
            {"expert_model_parallel_size": 3},
            "expert-model-parallel-size 3 does not divide number of experts = 8",
        ),
        (
            MOE,
            {"expert_tensor_parallel_size": 4},
            "expert-tensor-parallel-size 4 does not divide moe_intermediate_",
        ),
        (
            MOE,
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
            "need --sequence-parallel true",
        ),
        (MOE, {"tensor_model_parallel_size": 2}, "need --sequence-parallel true"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_with_the_numbers(
    tmp_path, config, layout, said
):
    description = read_description(folder_with(tmp_path, **config))
    description.check_layout(rank_config(""))
    with pytest.raises(ConfigError, match=said):
        description.check_layout(rank_config("", **layout))


def test_experts_on_tensor_parallel_ranks_need_sequence_parallelism_only_for_training(tmp_path):
    description = read_description(folder_with(tmp_path, **MOE))
    description.check_layout(rank_config("", tensor_model_parallel_size=2), trains=False)


def test_scaled_rotary_embeddings_are_found_in_each_format_of_config_json(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    newer = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    older = {"rope_parameters": None, "rope_theta": 5e5}
    for config in (
        newer,
        older | {"rope_scaling": {"rope_type": "llama3", **scaling}},
        older | {"rope_scaling": {"type": "llama3", **scaling}},
    ):
        options = read_description(folder_with(tmp_path, **config)).rope
        assert options.items() >= {"rope_theta": 5e5, **scaling}.items()
        # as transformers has it where no other context is given
        assert options["original_max_position_embeddings"] == 256


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_scaled_rotary_embedding_without_its_factor_is_refused(tmp_path, kind):
    rope = {"rope_theta": 5e5, "rope_type": kind}
    with pytest.raises(WeightError, match=r"config\.json: has no factor"):
        read_description(folder_with(tmp_path, rope_parameters=rope))


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_scaled_rotary_embedding_without_a_context_is_refused(tmp_path, kind):
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_theta": 5e5, "rope_type": kind, **scaling}
    text = rf"config\.json: has no max_position_embeddings, which rope_type = '{kind}' needs"
    with pytest.raises(WeightError, match=text):
        read_description(folder_with(tmp_path, rope_parameters=rope, max_position_embeddings=None))


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
def test_an_unsupported_layout_is_refused(tmp_path, model, layout, message):
    description = read_description(folder_with(tmp_path, **model))
    with pytest.raises(ConfigError, match=message):
        description.check_layout(rank_config(str(tmp_path), sequence_parallel=True, **layout))


def test_linear_layers_follow_from_the_interval_of_older_configurations(tmp_path):
    older = {key: value for key, value in HYBRID.items() if key != "layer_types"}
    folder = folder_with(tmp_path, **older, full_attention_interval=4)
    assert read_description(folder).fields["linear_attention_freq"] == [1, 1, 1, 0]


def test_a_factor_that_engines_ignore_is_refused(tmp_path):
    rope = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}
    with pytest.raises(WeightError, match=r"attention_factor=2\.0 is not supported"):
        read_description(folder_with(tmp_path, **GPT_OSS, rope_parameters=rope))


LOCAL = {"rope_type": "default", "rope_theta": 1e4}
NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": LOCAL}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh",
}


def test_gemma_without_the_base_of_its_windows_is_refused(tmp_path):
    older = {"rope_parameters": None, "rope_theta": 1e6}
    with pytest.raises(WeightError, match="has no 'rope_local_base_freq', which Gemma3"):
        read_description(folder_with(tmp_path, **GEMMA, **older))


def test_gemma_has_windows_and_rotary_embeddings_by_layer_in_each_format_of_config_json(tmp_path):
    older = {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    older |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    newer = {
        "rope_parameters": {"full_attention": scaled, "sliding_attention": LOCAL},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    for config in (older, newer):
        found = read_description(folder_with(tmp_path, **GEMMA, **config))
        assert found.tied
        assert found.rope.items() >= scaled.items()
        assert found.local_rope is not None and found.local_rope["rope_theta"] == 1e4
        assert found.fields["window_size"] == (7, 0)
        assert found.fields["window_attn_skip_freq"] == [1, 0, 1, 0]


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_scaling_replaces_other_options_as_in_transformers(tmp_path, key):
    given = {"rope_parameters": {"rope_theta": 37.0}, "rope_theta": 1e6}
    given |= {key: {"rope_type": "linear", "factor": 8.0}}
    options = read_description(folder_with(tmp_path, **given)).rope
    assert options == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("glm45_355b", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported"),
        ("minimax_m2_230b", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported"),
        ("qwen3_30b_a3b", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported"),
        ("gpt_oss_20b", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported"),
        (
            "glm45_355b",
            {"n_group": 8, "topk_group": 2},
            "8 with topk_group = 2 .*; use topk_group = 4",
        ),
        ("deepseek_v3", {"topk_group": 2}, "8 with topk_group = 2 .* use topk_group = 4"),
        ("glm45_355b", {"head_dim": 24, "partial_rotary_factor": 0.125}, "rotates 3 dimensions"),
        (
            "glm45_355b",
            {"rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0}},
            "partial_rotary_factor=1.0 is not supported",
        ),
    ],
)
def test_a_model_that_megatron_or_transformers_computes_otherwise_is_refused(
    tmp_path, name, change, said
):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | change))
    with pytest.raises(WeightError, match=said):
        read_description(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        ({"rope_parameters": LOCAL}, "rope_parameters = .* has no full_attention"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling = .* has no rope_type"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
                    "sliding_attention": LOCAL,
                }
            },
            "rope_type='yarn' is not supported",
        ),
    ],
)
def test_unsupported_options_of_gemma_are_refused(tmp_path, change, said):
    with pytest.raises(WeightError, match=said):
        read_description(folder_with(tmp_path, **{"rope_parameters": NESTED} | GEMMA | change))


def test_a_layer_with_a_disabled_window_is_refused(tmp_path):
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    with pytest.raises(WeightError, match="while use_sliding_window is false"):
        read_description(folder_with(tmp_path, **kinds))
