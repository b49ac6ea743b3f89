"""The table [fleet], and runs whose engines are all in the fleet."""

import pytest

from rlpost.config.checks.fleet import fleet_model_problems, fleet_problems
from rlpost.config.load import load

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
