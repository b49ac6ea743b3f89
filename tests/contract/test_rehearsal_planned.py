"""The planner's bytes beside those of a rehearsal, for models of full width with a few layers.

Weights, gradients and optimizer of both must agree, except for Megatron's padding. The planner
computes activations from formulas; their ratio to the rehearsal is recorded for each case, so that
a change of either shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.extensions.rehearsal.all_ranks.result import Compared
from rlpost.extensions.rehearsal.all_ranks.run import RehearsalOptions, rehearse_run
from tests.contract.cuda.test_every_rank import recipe_config

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="run with CUDA_VISIBLE_DEVICES= (empty)"),
    pytest.mark.filterwarnings("ignore"),  # Megatron repeats its warnings for every rank
]
NOTHING_AGAIN = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}
AGAIN = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
INTERLEAVED = AGAIN | {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4,
    "num_layers_per_virtual_pipeline_stage": 1,
}  # fmt: skip
WHOLE_STATE = AGAIN | {"use_distributed_optimizer": False, "overlap_param_gather": False}
DENSE, EXPERTS, LARGE = "qwen3_4b", "qwen3_30b_a3b", "glm45_355b"
FOUR_LAYERS = {"hf": {"num_hidden_layers": 4}, "perf": AGAIN}
FOUR_OF_EXPERTS = {"hf": {"num_hidden_layers": 4}}
LONG_BATCHES = {
    "tensor_model_parallel_size": 4,
    "context_parallel_size": 1,
    "max_tokens_per_gpu": 20480,
}
ALL_SIZES = {
    "hf": {"num_hidden_layers": 8, "n_routed_experts": 40},
    "perf": {
        "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 4, "max_tokens_per_gpu": 2048,
        "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3,
    },
    "rollout": {"rollout_max_response_len": 4096},
    "cluster": {"actor_num_nodes": 2, "rollout_num_gpus_per_engine": 8},
    "optimizer": {"optimizer_cpu_offload": False},
}  # fmt: skip
"""TP 2, PP 4, CP 2, EP 4 on 16 ranks; as many experts a rank as 160 experts at EP 16 give."""

Case = tuple[str, dict[str, dict[str, Any]], float]
CASES: dict[str, Case] = {
    "dense": (DENSE, FOUR_LAYERS, 1.0),
    "dense, nothing recomputed": (DENSE, FOUR_LAYERS | {"perf": NOTHING_AGAIN}, 1.014),
    "dense, interleaved": (DENSE, {"hf": {"num_hidden_layers": 8}, "perf": INTERLEAVED}, 0.98),
    "experts, nothing recomputed": (EXPERTS, FOUR_OF_EXPERTS | {"perf": NOTHING_AGAIN}, 1.0165),
    "experts at every parallel size": (LARGE, ALL_SIZES, 0.998),
    "adapters": (DENSE, FOUR_LAYERS | {"lora": {"lora_rank": 16}}, 1.014),
    "critic": (DENSE, FOUR_LAYERS | {"grpo": {"advantage_estimator": "ppo"}}, 1.0),
    "Muon with experts": (
        EXPERTS,
        FOUR_OF_EXPERTS | {"perf": WHOLE_STATE | LONG_BATCHES, "optimizer": {"optimizer": "muon"}},
        0.989,
    ),
}  # fmt: skip
"""Recipe, changed settings, and planned activations and logits divided by rehearsed ones."""


def compared(folder: Path, name: str) -> dict[str, Compared]:
    recipe, changed, _ = CASES[name]
    config, _ = recipe_config(recipe, folder, **changed)
    result = rehearse_run(config, RehearsalOptions())
    faults = [fault for one in result.checks for fault in one.faults]
    assert faults == []
    return {one.name: one for one in result.compared}


@pytest.mark.parametrize("name", CASES)
def test_the_planner_agrees_with_the_rehearsal(tmp_path, name):
    parts = compared(tmp_path, name)
    passing = parts.pop("activations, logits")
    parts.pop("all while training")
    for part in parts.values():
        assert part.planned == pytest.approx(part.rehearsed, rel=0.02, abs=1), part
    assert passing.planned / passing.rehearsed == pytest.approx(CASES[name][2], rel=0.01)
