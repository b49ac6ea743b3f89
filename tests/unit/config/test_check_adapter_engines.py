"""Settings that engines with adapters exclude are named with what would do, and what engines get."""

from __future__ import annotations

from typing import Any

from rlpost.config.checks.lora import (
    adapter_engine_model_problems,
    adapter_engine_problems,
)
from rlpost.config.engine_args import engine_args
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.engines.server_args import check_server_args
from rlpost.extensions.planning.adapters import served_adapters
from tests.unit.planning.test_plan import DENSE

SYNC = {"update_weight_mode": "adapter", "update_weight_transport": "disk"}
LORA = {"lora_rank": 8}
DENSE_MODEL = {"architectures": ["Qwen3ForCausalLM"]}
SPARSE_MODEL = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}


def config(**groups: Any) -> Config:
    return load([], {"sync": SYNC, "lora": LORA, "rollout": {"num_rollout": 1}} | groups).config


def test_adapters_in_files_have_no_problems_and_other_modes_are_not_looked_at():
    assert adapter_engine_problems(config()) == []
    assert adapter_engine_problems(config(sync={}, cluster={"colocate": True})) == []
    same = {"hf_checkpoint": "/m", "ref_load": "/m"}
    assert adapter_engine_problems(config(checkpoint=same)) == []
    assert adapter_engine_problems(config(sglang={"sglang_speculative_algorithm": "NGRAM"})) == []


def test_a_model_whose_weights_or_experts_do_not_fit_is_named():
    assert adapter_engine_model_problems(config(), DENSE_MODEL) == []
    attention = config(lora=LORA | {"lora_targets": ["linear_qkv", "linear_proj"]})
    assert adapter_engine_model_problems(attention, SPARSE_MODEL) == []
    (problem,) = adapter_engine_model_problems(config(), SPARSE_MODEL)
    assert "--lora-targets linear_qkv linear_proj linear_fc1 linear_fc2" in problem
    assert "use --lora-targets linear_qkv linear_proj, or" in problem
    quantised = DENSE_MODEL | {"quantization_config": {"quant_method": "fp8"}}
    (problem,) = adapter_engine_model_problems(config(), quantised)
    assert "--hf-checkpoint has fp8 weights" in problem
    with_images = {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}}
    (problem,) = adapter_engine_model_problems(config(), with_images)
    assert "adapters of Qwen3VLForConditionalGeneration" in problem


def test_engines_get_options_that_sglang_knows_with_the_layers_of_the_targets():
    given = engine_args(config(lora=LORA | {"lora_targets": ["linear_fc2", "linear_qkv"]}))
    assert given["enable_lora"] is True
    assert given["max_lora_rank"] == 8
    assert given["lora_target_modules"] == ["down_proj", "q_proj", "k_proj", "v_proj"]
    check_server_args(given)
    assert engine_args(config(sync={})) == {}


def test_the_planner_counts_the_adapters_of_the_file():
    """PEFT's file for Qwen3-4B at rank 32, counted from its matrices: 36 layers."""
    hidden, queries, keys, ffn = 2560, 32 * 128, 8 * 128, 9728
    shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    shapes += [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    expected = 36 * 32 * sum(outputs + inputs for outputs, inputs in shapes)
    given = config(lora={"lora_rank": 32}).lora
    shape = DENSE.__class__(
        hidden=hidden, ffn=ffn, heads=32, groups=8, head_dim=128, vocab=151936,
        sparse=(False,) * 36, tied=True, qk_norm=True,
    )  # fmt: skip
    assert served_adapters(given, shape) == expected
    assert round(2 * expected / 1e6) == 132
