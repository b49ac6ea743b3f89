"""When a beginning that samples share is computed once."""

from __future__ import annotations

import pytest

from rlpost.config.checks.prefix import prefix_problem, with_prefix_sharing
from rlpost.config.load import load

HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
}


def config(**tables):
    return load([], tables).config


@pytest.mark.parametrize(
    ("tables", "fields", "word"),
    [
        ({"perf": {"context_parallel_size": 2}}, {}, "--context-parallel-size"),
        ({}, {"multi_latent_attention": True}, "latent attention"),
        ({}, {"linear_attention_freq": [1, 0]}, "a state from token to token"),
        ({"grpo": {"enable_mtp_training": True}}, {}, "--enable-mtp-training"),
        ({"megatron": {"moe_expert_capacity_factor": 1.5}}, {}, "--moe-expert-capacity-factor"),
        ({"megatron": {"moe_z_loss_coeff": 1e-3}}, {}, "--moe-z-loss-coeff 0.001"),
        ({"megatron": {"attention_backend": "unfused"}}, {}, "--attention-backend unfused"),
    ],
)
def test_what_would_change_the_result_is_the_reason_against_it(tables, fields, word):
    assert word in (prefix_problem(config(**tables), fields) or "")


def test_experts_alone_are_no_reason():
    assert prefix_problem(config(), {"num_moe_experts": 8}) is None


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "local"])
def test_kernels_with_separate_bounds_of_queries_and_keys_share_rows(backend):
    assert prefix_problem(config(megatron={"attention_backend": backend}), {}) is None


def test_by_default_it_is_on_without_gpus_alone():
    on, reason = with_prefix_sharing(config(), HF, has_gpus=False)
    assert on.perf.share_prefix is True and reason is None
    off, reason = with_prefix_sharing(config(), HF, has_gpus=True)
    assert off.perf.share_prefix is False and "measured" in (reason or "")
    unknown = with_prefix_sharing(config(), {"architectures": ["Nobody"]}, has_gpus=False)
    assert unknown[0].perf.share_prefix is False and "Nobody" in (unknown[1] or "")


@pytest.mark.parametrize("given", [True, False])
def test_a_given_value_stays(given):
    found, reason = with_prefix_sharing(config(perf={"share_prefix": given}), HF, has_gpus=True)
    assert found.perf.share_prefix is given and reason is None
