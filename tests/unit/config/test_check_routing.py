"""Routing replay: settings of the trainer, the model and the engines that conflict with it are
refused.
"""

import pytest

from rlpost.cli.check_settings import check
from rlpost.config.checks.routing import routing_model_problems, routing_problems
from rlpost.config.load import load
from rlpost.engines.server_args import check_server_args
from rlpost.errors import ConfigError

DENSE, MIXTURE = {"hidden_size": 8}, {"n_routed_experts": 8}
BOTH = {"use_rollout_routing_replay": True, "use_routing_replay": True}


def config(megatron=None, **grpo):
    return load([], {"grpo": grpo, "megatron": megatron or {}}).config


def test_both_flags_together_and_neither_are_accepted():
    assert routing_problems(config(**BOTH)) == routing_model_problems(config(**BOTH), MIXTURE) == []
    fused = config({"moe_router_fusion": True})
    assert routing_problems(fused) == routing_model_problems(fused, DENSE) == []


def engine_config(replay=True, **sglang):
    return load([], {"grpo": {"use_rollout_routing_replay": replay}, "sglang": sglang}).config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sglang_speculative_algorithm": "EAGLE"}, "--sglang-speculative-algorithm EAGLE"),
        ({"sglang_enable_hierarchical_cache": True}, "--sglang-enable-hierarchical-cache true"),
        ({"sglang_enable_lmcache": True}, "--sglang-enable-lmcache true"),
        ({"sglang_disaggregation_mode": "decode"}, "--sglang-disaggregation-mode decode"),
        ({"sglang_enable_two_batch_overlap": True}, "--sglang-enable-two-batch-overlap true"),
        ({"sglang_tokenizer_worker_num": 2}, "--sglang-tokenizer-worker-num 2"),
        (
            {"sglang_moe_runner_backend": "flashinfer_trtllm"},
            "--sglang-moe-runner-backend flashinfer_trtllm",
        ),
    ],
)
def test_settings_of_engines_that_lose_routes_are_refused_with_a_remedy(settings, words):
    (problem,) = routing_problems(engine_config(**settings))
    assert problem.startswith(f"{words} with --use-rollout-routing-replay true: ")
    assert problem.endswith("leave it out, or use --use-rollout-routing-replay false")
    assert not routing_problems(engine_config(replay=False, **settings))
    with pytest.raises(ConfigError, match=words):
        check(engine_config(**settings), run=None)


def test_other_settings_of_engines_are_accepted():
    assert not routing_problems(engine_config())
    assert not routing_problems(
        engine_config(sglang_moe_runner_backend="triton", sglang_disable_radix_cache=True)
    )
    assert not routing_problems(engine_config(rollout_external_engine_addrs=["a:1"]))


def test_the_server_argument_for_routes_is_set_by_rlpost():
    with pytest.raises(
        ConfigError, match="this follows from --use-rollout-routing-replay; leave it out"
    ):
        check_server_args({"enable_return_routed_experts": True})
