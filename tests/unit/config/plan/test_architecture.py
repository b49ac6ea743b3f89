"""MODEL_ARGS compared with config.json: a recipe of another model is reported with both values."""

from __future__ import annotations

import json

import pytest

from rlpost.config import flags
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.config.load import load
from rlpost.config.model_arguments import NAMES, ONLY_ZERO, WITHOUT_EFFECT, problems
from rlpost.config.plan.architecture import architecture, overridden
from rlpost.errors import ConfigError
from rlpost.models.families import family
from rlpost.trainer.model_description import read_description

GLM = {
    # GLM-4.5-355B-A32B, https://huggingface.co/zai-org/GLM-4.5/blob/main/config.json
    "max_position_embeddings": 131072,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
ARGUMENTS = {  # as recipes for Megatron give them
    "num_layers": 92, "hidden_size": 5120, "ffn_hidden_size": 12288, "num_attention_heads": 96,
    "group_query_attention": True, "num_query_groups": 8, "kv_channels": 128, "normalization": "RMSNorm",
    "rotary_base": 1e6, "rotary_percent": 0.5, "use_rotary_position_embeddings": True, "vocab_size": 151552,
    "untie_embeddings_and_output_weights": True, "disable_bias_linear": True, "add_qkv_bias": True,
    "qk_layernorm": True, "swiglu": True, "num_experts": 160, "moe_layer_freq": "[0]*3+[1]*89",
    "moe_ffn_hidden_size": 1536, "moe_shared_expert_intermediate_size": 1536, "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True, "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0, "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0,
}  # fmt: skip
GLM_FAMILY = family("Glm4MoeForCausalLM")


SAYS = architecture(GLM_FAMILY, GLM)


def test_the_arguments_of_a_published_recipe_agree_with_the_published_model():
    assert problems(ARGUMENTS, SAYS) == []


def test_a_command_line_of_them_agrees_too():
    """Flags give text, and a switch may stand alone."""
    words = [
        word
        for name, value in ARGUMENTS.items()
        for word in ([flags.flag(name)] if value is True else [flags.flag(name), str(value)])
    ]
    _, values = flags.parse(flags.make_parser("rlpost", ""), words)
    given = load([], values).config.checkpoint.model_args
    assert given.keys() == ARGUMENTS.keys()
    assert problems(given, SAYS) == []


def test_every_argument_is_compared_or_known_to_have_no_effect():
    assert SAYS.keys() | ONLY_ZERO | WITHOUT_EFFECT == NAMES


@pytest.mark.parametrize(
    ("change", "theirs"),
    [
        ({"num_layers": 46}, "92"),
        ({"rotary_base": 10000}, "1000000"),
        ({"moe_layer_freq": "[0]*1+[1]*91"}, "0 0 0 1"),
        ({"add_qkv_bias": False}, "true"),
        ({"moe_router_score_function": "softmax"}, "sigmoid"),
        ({"moe_router_topk_scaling_factor": 1.0}, "2.5"),
        ({"post_mlp_layernorm": True}, "false"),
        ({"num_layers": "ninety-two"}, "92"),
        ({"qk_layernorm": "false"}, "true"),
    ],
)
def test_a_value_of_another_model_is_named_with_both_values(change, theirs):
    (problem,) = problems(ARGUMENTS | change, SAYS)
    ((name, _),) = change.items()
    assert problem.startswith(f"--{name.replace('_', '-')} ") and f"says {theirs}" in problem


def test_experts_of_a_dense_model_are_reported():
    dense = GLM | {"architectures": ["Qwen3ForCausalLM"]}
    says = architecture(family("Qwen3ForCausalLM"), dense)
    (problem,) = problems({"num_experts": 8, "moe_shared_expert_gate": False}, says)
    assert "--num-experts 8" in problem and "has no such setting" in problem


def test_an_allowed_override_of_config_json_takes_precedence():
    given = CheckpointConfig(override_hf_config=["rotary_base=10000"]).override_hf_config
    assert overridden(given, GLM)["rope_theta"] == 10000
    newer = {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}
    assert overridden(given, newer)["rope_parameters"] == {
        "rope_theta": 10000,
        "partial_rotary_factor": 0.5,
    }


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["num_layers=92"], "num_layers cannot be overridden, .* only norm_epsilon, rotary_base"),
        (["rotary_base"], "write NAME=VALUE, not 'rotary_base'"),
        (["rotary_base=-1"], "rotary_base=-1 must be positive"),
        (["rotary_percent=1.5"], "rotary_percent at most 1"),
        (["moe_router_topk=1.5"], "moe_router_topk=1.5 must be a whole number"),
        (["rotary_base=much"], "--override-hf-config much: must be a number"),
    ],
)
def test_an_override_that_the_weights_do_not_allow_is_named(words, problem):
    with pytest.raises(ConfigError, match=problem):
        load([], {"checkpoint": {"override_hf_config": words}})


def test_a_description_reports_all_differences_and_applies_overrides(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    wrong = CheckpointConfig(model_args=ARGUMENTS | {"num_layers": 46, "hidden_size": 4096})
    with pytest.raises(ConfigError) as raised:
        read_description(tmp_path, wrong)
    assert len(str(raised.value).splitlines()) == 2
    changed = CheckpointConfig(
        model_args=ARGUMENTS | {"rotary_base": 10000}, override_hf_config={"rotary_base": 10000}
    )
    assert read_description(tmp_path, changed).rope["rope_theta"] == 10000


@pytest.mark.parametrize(
    "written", ["[0]*3+[1]*2", "([0]*3+[1]*2)", ["[0]*3 + [1,1]"], [0, 0, 0, 1, 1]]
)
def test_the_pattern_of_layers_is_read_as_megatron_writes_it(written):
    given = CheckpointConfig(model_args={"moe_layer_freq": written}).model_args
    assert problems(given, {"moe_layer_freq": (0, 0, 0, 1, 1)}) == []


@pytest.mark.parametrize(
    "written", ["[0]*3-[1]", "[2]*3", "[1]*99999999999", "__import__('os')", "1", []]
)
def test_a_malformed_layer_pattern_is_refused_and_never_evaluated(written):
    (problem,) = problems({"moe_layer_freq": written}, SAYS)
    assert "[0]*3+[1]*89" in problem


@pytest.mark.parametrize("name", sorted(ONLY_ZERO))
def test_a_value_that_the_trainer_lacks_is_refused(name):
    assert problems({name: "0.0"}, SAYS) == []
    (problem,) = problems({name: 0.1}, SAYS)
    assert problem.startswith(flags.flag(name)) and "only 0 is supported" in problem


def test_an_argument_may_be_unset_and_an_unknown_one_is_named():
    assert CheckpointConfig(model_args={"num_layers": "none"}).model_args == {}
    with pytest.raises(ConfigError, match=r"num_layer is no argument of a model.*num_layers"):
        load([], {"checkpoint": {"model_args": {"num_layer": 3}}})
