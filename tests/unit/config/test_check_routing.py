"""Routing replay needs experts, and a router whose choice can be replaced."""

import pytest

from rlpost.config.checks.routing import routing_model_problems, routing_problems
from rlpost.config.load import load

DENSE, MIXTURE = {"hidden_size": 8}, {"n_routed_experts": 8}
BOTH = {"use_rollout_routing_replay": True, "use_routing_replay": True}


def config(megatron=None, **grpo):
    return load([], {"grpo": grpo, "megatron": megatron or {}}).config


def test_both_flags_together_and_neither_are_accepted():
    assert routing_problems(config(**BOTH)) == routing_model_problems(config(**BOTH), MIXTURE) == []
    fused = config({"moe_router_fusion": True})
    assert routing_problems(fused) == routing_model_problems(fused, DENSE) == []


@pytest.mark.parametrize(
    ("megatron", "grpo", "words"),
    [
        (
            {"moe_router_fusion": True},
            {"use_routing_replay": True},
            ["--moe-router-fusion true with --use-routing-replay true", "use --use-routing-replay false"],
        ),
        ({"cuda_graph_impl": "local"}, BOTH, ["--cuda-graph-impl local", "--use-rollout-routing-replay false"]),
        ({"moe_expert_capacity_factor": 1.5}, BOTH, ["--moe-expert-capacity-factor 1.5", "drops tokens"]),
        ({}, BOTH | {"loss_type": "sft_loss"}, ["--loss-type sft_loss", "no engine routes the tokens"]),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_its_remedy(megatron, grpo, words):
    (problem,) = routing_problems(config(megatron, **grpo))
    assert all(word in problem for word in words)


def test_a_model_without_experts_is_refused():
    (problem,) = routing_model_problems(config(use_routing_replay=True), DENSE)
    assert problem == "--use-routing-replay true: the model has no experts; use --use-routing-replay false"
