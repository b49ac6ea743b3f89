"""The table [fleet], and runs whose engines are all in the fleet."""

import pytest

from rlpost.config.load import load
from rlpost.extensions.fleet.fleet_checks import (
    fleet_model_problems,
    fleet_problems,
    group_problems,
)

NONE_OF_ITS_OWN = {"rollout_num_gpus": 0, "num_gpus_per_node": 1, "actor_num_gpus_per_node": 1}


def problems(fleet, **groups):
    return fleet_problems(
        load([], {"fleet": fleet, "rollout": {"num_rollout": 1}, **groups}).config
    )


@pytest.mark.parametrize(
    ("fleet", "groups"),
    [
        ({}, {}),
        ({"engines": 4}, {}),
        ({"engines": 4, "min_engines": 3}, {}),
        ({"engines": 4}, {"cluster": {"colocate": True}}),
        ({"min_engines": 1}, {"cluster": NONE_OF_ITS_OWN}),
        ({"min_engines": 1, "engines": 2}, {"cluster": NONE_OF_ITS_OWN}),
        ({}, {"grpo": {"loss_type": "sft_loss"}}),
        ({"min_engines": 1}, {"debug": {"debug_rollout_only": True}}),  # it has an engine
        ({}, {"cluster": {"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 2}}),  # layout
    ],
)
def test_what_can_run(fleet, groups):
    assert problems(fleet, **groups) == []


def test_a_quantised_checkpoint_is_refused_only_with_a_fleet():
    hf = {"quantization_config": {"quant_method": "fp8"}}
    asks = load([], {"fleet": {"engines": 1}}).config
    (problem,) = fleet_model_problems(asks, hf)
    assert problem.startswith("--engines 1: --hf-checkpoint has fp8 weights")
    assert fleet_model_problems(load([], {}).config, hf) == []
    assert fleet_model_problems(asks, {}) == []


GROUP = {"model": "/m", "engines": 2, "gpus": 2, "fleet": True}


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            {**GROUP, "gpus": 12},
            "[engines.judge] fleet = true and gpus = 12: an engine of a fleet has one node, of "
            "--num-gpus-per-node 8; use gpus = 8 or less",
        ),
        (
            {**GROUP, "gpus": None, "nodes": 2},
            "[engines.judge] fleet = true and nodes = 2: an engine of a",
        ),
        (
            {**GROUP, "sglang_enable_dp_attention": True, "sglang_dp_size": 2},
            "fleet = true and sglang_enable_dp_attention: an engine of a fleet cannot",
        ),
    ],
)
def test_an_engine_of_a_groups_fleet_has_one_node(group, words):
    (problem,) = group_problems(load([], {"engines": {"judge": group}}).config)
    assert words in problem
    assert not group_problems(load([], {"engines": {"judge": {**group, "fleet": False}}}).config)


def test_what_can_run_as_the_fleet_of_a_group():
    assert not group_problems(load([], {"engines": {"judge": GROUP}}).config)
