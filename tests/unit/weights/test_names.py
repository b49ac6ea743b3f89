"""The tables of weight names."""

from __future__ import annotations

import pytest

from rlpost.errors import WeightError
from rlpost.weights.families import FAMILIES, family
from rlpost.weights.names import Rule, renumber, to_hugging_face

QWEN3 = FAMILIES["Qwen3ForCausalLM"].rules


def test_the_layer_number_stands_on_both_sides():
    rule = to_hugging_face("decoder.layers.11.mlp.linear_fc1.weight", QWEN3)
    names = ("model.layers.11.mlp.gate_proj.weight", "model.layers.11.mlp.up_proj.weight")
    assert rule == Rule("decoder.layers.11.mlp.linear_fc1.weight", names, "gated")


def test_the_expert_number_stands_on_both_sides_beside_the_layer_number():
    name = "decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight"
    rules = FAMILIES["Qwen3MoeForCausalLM"].rules
    assert to_hugging_face(name, rules).hugging_face == ("model.layers.3.mlp.experts.3.down_proj.weight",)
    renumbered = renumber(name, layer=40, expert=127)
    assert renumbered == "decoder.layers.40.mlp.experts.local_experts.127.linear_fc2.weight"
    assert to_hugging_face(renumbered, rules).hugging_face == ("model.layers.40.mlp.experts.127.down_proj.weight",)


def test_names_outside_the_layers_are_found_as_well():
    assert to_hugging_face("output_layer.weight", QWEN3).hugging_face == ("lm_head.weight",)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_name_stands_twice_in_a_table(architecture):
    rules = family(architecture).rules
    for names in ([rule.megatron for rule in rules], [name for rule in rules for name in rule.hugging_face]):
        assert len(names) == len(set(names))


def test_an_unknown_parameter_is_named():
    with pytest.raises(WeightError, match=r"decoder\.layers\.0\.mlp\.router\.weight"):
        to_hugging_face("decoder.layers.0.mlp.router.weight", QWEN3)


def test_an_unknown_architecture_is_named_with_those_known():
    with pytest.raises(WeightError, match=r"'GPT2LMHeadModel'.*Qwen3ForCausalLM"):
        family("GPT2LMHeadModel")
