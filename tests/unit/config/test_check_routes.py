"""Settings of engines with which the experts that they chose cannot be returned are refused."""

import pytest

from rlpost.check import check
from rlpost.config.checks.routes import route_problems
from rlpost.config.load import load
from rlpost.errors import ConfigError
from rlpost.rollout.server_args import check_server_args


def config(replay=True, **sglang):
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
        ({"sglang_moe_runner_backend": "flashinfer_trtllm"}, "--sglang-moe-runner-backend flashinfer_trtllm"),
        ({"rollout_external_engine_addrs": ["a:1"]}, "--rollout-external-engine-addrs a:1"),
    ],
)
def test_what_returns_no_routes_or_wrong_ones_is_refused_with_its_remedy(settings, words):
    (problem,) = route_problems(config(**settings))
    assert problem.startswith(f"{words} with --use-rollout-routing-replay true: ")
    assert problem.endswith("leave it out, or use --use-rollout-routing-replay false")
    assert not route_problems(config(replay=False, **settings))
    with pytest.raises(ConfigError, match=words):
        check(config(**settings), run=None)


def test_everything_else_is_accepted():
    assert not route_problems(config())
    assert not route_problems(config(sglang_moe_runner_backend="triton", sglang_disable_radix_cache=True))


def test_the_flag_of_the_server_follows_from_ours():
    with pytest.raises(ConfigError, match="this follows from --use-rollout-routing-replay; leave it out"):
        check_server_args({"enable_return_routed_experts": True})
