"""A rehearsal of each kind of model and of training: it has no fault, and planted faults are found.

The models are the tiny ones of ``tests/contract/families.py``, on eight ranks at TP 2, PP 2, EP 2,
DP 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.rehearsal.all_ranks import run as run_module
from rlpost.extensions.rehearsal.all_ranks.distributed_calls import Recording
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts
from rlpost.extensions.rehearsal.all_ranks.result import RehearsalResult
from rlpost.extensions.rehearsal.all_ranks.run import RehearsalOptions, rehearse_run
from rlpost.extensions.rehearsal.all_ranks.symmetry import Recorded
from rlpost.trainer.memory import GRADS, OPTIMIZER, WEIGHTS, DeviceMemory
from tests.contract.all_ranks import (
    Rehearsal,
    contradictions,
    coverage,
    critic,
    model_problems,
    num_optimized,
    rehearse,
)
from tests.contract.all_ranks.other_layout import load_problems
from tests.contract.all_ranks.saved import SavedFacts
from tests.contract.cuda.test_every_rank import recipe_config
from tests.contract.families import make_family_config

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="run with CUDA_VISIBLE_DEVICES= (empty)"),
    pytest.mark.filterwarnings("ignore"),  # Megatron repeats its warnings for every rank
]
EIGHT: dict[str, dict[str, Any]] = {
    "perf": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
        "sequence_parallel": True, "max_tokens_per_gpu": 96, "use_dynamic_batch_size": True,
    },
    "cluster": {
        "actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "num_gpus_per_node": 8,
        "rollout_num_gpus_per_engine": 8, "colocate": True,
    },
    "rollout": {"rollout_max_response_len": 48, "rollout_max_prompt_len": 16, "rollout_batch_size": 2,
                "n_samples_per_prompt": 8},
    "sync": {"update_weight_buffer_size": 50_000},
    "optimizer": {"optimizer_cpu_offload": False},
}  # fmt: skip
NUM_MICRO_BATCHES = 2
"""Enough for each part of the schedule of two pipeline stages: warm-up, steady state, cool-down."""
DENSE, MOE = "qwen3", "glm4.5-moe"
NEWER = ("deepseek-v3-moe", "gpt-oss-moe", "minimax-m2-moe", "qwen2-moe", "qwen3.5-moe-published",
         "gemma3-published")  # fmt: skip
LORA = {"lora": {"lora_rank": 4}}
LORA_EXPERTS = {
    "lora": {"lora_rank": 4, "lora_targets": ("linear_qkv", "linear_fc1", "linear_fc2", "experts")}
}
PPO = {"grpo": {"advantage_estimator": "ppo"}}
MUON = {"optimizer": {"optimizer": "muon", "optimizer_cpu_offload": False},
        "perf": {"use_distributed_optimizer": False}}  # fmt: skip
FROZEN = {
    "optimizer": {
        "freeze_params_name_list": ("router", "embedding"),
        "optimizer_cpu_offload": False,
    }
}
ONLY_ATTENTION = {
    "optimizer": {
        "only_train_params_name_list": ("self_attention",),
        "optimizer_cpu_offload": False,
    }
}
IMAGES = {
    "rollout": {"multimodal_keys": {"image": "images"}, "apply_chat_template": True},
    "perf": {"decoder_first_pipeline_num_layers": 3},  # features are added in all three
}
TRAININGS = {
    "images": ("qwen3-vl-moe", IMAGES),
    "LoRA": (DENSE, LORA), "LoRA of experts": (MOE, LORA_EXPERTS), "LoRA with a reference": (
        DENSE, LORA | {"grpo": {"use_kl_loss": True}}
    ),
    "PPO of a tied model": ("qwen3-tied", PPO), "PPO with experts": (MOE, PPO),
    "frozen weights": (MOE, FROZEN), "only attention trained": (DENSE, ONLY_ATTENTION),
    "Muon with experts": (MOE, MUON),
    "experts without expert parallelism": (
        MOE, {"perf": {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}}
    ),
}  # fmt: skip


def config_of(model: str, folder: Path, changed: dict[str, Any]) -> Config:
    """Return the settings of a tiny model on eight ranks.

    Its config.json is written to the folder that they name.
    """
    make_family_config(folder / "model", model)
    experts = {"perf": {"expert_model_parallel_size": 2 if "moe" in model else 1}}
    merged: dict[str, dict[str, Any]] = {}
    for given in (EIGHT, experts, changed):
        for group, values in given.items():
            merged[group] = merged.get(group, {}) | values
    return recipe_config("tiny", folder, **merged)[0]


@dataclass(frozen=True)
class Built:
    """All ranks of a kind of model or training."""

    config: Config
    folder: Path
    made: Rehearsal

    @property
    def ranks(self) -> Mapping[int, SavedFacts]:
        return self.made.ranks


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Return a function that builds the ranks of a kind, once."""

    @cache
    def build(kind: str) -> Built:
        model, changed = TRAININGS.get(kind, (kind, {}))
        folder = tmp_path_factory.mktemp("kind")
        config = config_of(model, folder, changed)
        return Built(config, folder, rehearse(config))

    return build


def rehearsed(config: Config, facts: Mapping[int, RankFacts] | None = None) -> RehearsalResult:
    return rehearse_run(config, RehearsalOptions(micro_batches=NUM_MICRO_BATCHES), facts=facts)


def faults(result: RehearsalResult) -> dict[str, tuple[str, ...]]:
    return {one.name: one.faults[:5] for one in result.checks if one.faults}


@pytest.mark.parametrize("kind", [*NEWER, *TRAININGS])
def test_a_kind_of_model_or_training_has_no_fault(built, kind):
    """Its ranks make up the model, their checkpoint loads at another layout, and a step runs."""
    config, made = built(kind).config, built(kind).made
    assert list(model_problems(made.ranks, made.plans, made.expected)) == []
    assert list(load_problems(config, made.ranks)) == []
    result = rehearsed(config, made.ranks)
    assert faults(result) == {}
    assert len(result.ran) < 8, "two ranks of each class agree"


def test_frozen_weights_have_no_gradient_and_no_state(built):
    """Gradients and optimizer take as many bytes as the trained weights need, padding aside."""
    kind = built("only attention trained")
    config, ranks = kind.config, kind.ranks
    trained = {rank: sum(one.size for one in facts.trained) for rank, facts in ranks.items()}
    assert all("self_attention" in one.name for facts in ranks.values() for one in facts.trained)
    assert coverage.num_frozen(ranks) > 0
    for rank, facts in ranks.items():
        assert 0 < trained[rank] < facts.num_parameters / 2
        assert facts.memory.gradients == pytest.approx(4 * trained[rank], rel=0.05)
    shares = sum(num_optimized(facts) for facts in ranks.values())
    assert shares == sum(trained.values()) / config.data_parallel_size


def test_a_stage_that_trains_nothing_is_rejected_as_in_a_run(tmp_path):
    only_first = {"optimizer": {"only_train_params_name_list": (r"layers\.0\.",),
                                "optimizer_cpu_offload": False}}  # fmt: skip
    with pytest.raises(ConfigError, match=r"pipeline stages \[1\] have no parameter to train"):
        rehearsed(config_of(DENSE, tmp_path, only_first))


# Planted faults.


def test_an_adapter_in_the_wrong_place_and_one_without_optimizer_are_found(built):
    kind = built("LoRA")
    config, ranks = kind.config, kind.ranks
    assert kind.made.problems == []
    expected = contradictions.expected_of(config, hf_of(kind.folder))
    assert all(one.adapters for one in ranks.values())
    adapters = ranks[5].adapters
    index = next(number for number, one in enumerate(adapters) if one.num_shards == 2)
    moved = replace(adapters[index], shard=1 - adapters[index].shard)
    wrong = {
        **ranks,
        5: replace(ranks[5], adapters=(*adapters[:index], moved, *adapters[index + 1 :])),
    }
    (fault,) = contradictions.adapter_problems(wrong, expected)
    assert fault.startswith(f"rank 5: it holds shard {moved.shard} of {moved.name}")
    without = replace(adapters[index], optimizer=None)
    spread = config.perf.use_distributed_optimizer
    bare = {
        rank: replace(one, adapters=tuple(replace(each, optimizer=None) for each in one.adapters))
        for rank, one in ranks.items()
    }
    assert without.name in " ".join(coverage.optimizer_problems(bare, spread=spread))
    fewer = {**ranks, 6: replace(ranks[6], adapters=ranks[6].adapters[:-1])}
    (fault,) = contradictions.adapter_problems(fewer, expected)
    assert fault.startswith("rank 6: ")
    assert "are in adapters, the planner counts" in fault


def hf_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "model" / "config.json").read_text())
    return found


def test_a_critic_without_its_head_or_its_optimizer_is_found(built):
    kind = built("PPO with experts")
    ranks = kind.ranks
    assert kind.made.problems == []
    expected = contradictions.expected_of(kind.config, hf_of(kind.folder))

    def found(rank: int, **fields: Any) -> list[str]:
        facts = ranks[rank]
        assert facts.critic is not None
        changed = {**ranks, rank: replace(facts, critic=replace(facts.critic, **fields))}
        return list(critic.problems(changed, expected))

    weights = ranks[7].critic.weights
    headless = found(7, weights=tuple(one for one in weights if "output_layer" not in one.name))
    assert any(line.startswith("critic: rank 7: it lacks score.weight") for line in headless)
    whole = next(number for number, one in enumerate(weights) if one.optimizer is not None)
    start, end = weights[whole].optimizer
    cut = replace(weights[whole], optimizer=(start, end - 1))
    (fault,) = found(7, weights=(*weights[:whole], cut, *weights[whole + 1 :]))
    assert cut.name in fault
    assert "7" in fault
    assert any("checkpoint: " in line for line in found(4, checkpoint=()))


@pytest.fixture(scope="module")
def offload_faults(built: Callable[[str], Built]) -> Callable[[], tuple[str, ...]]:
    """Return a function that rehearses rank 0: the check of a rank needs no other rank."""

    def of_first(facts: Mapping[int, RankFacts], run: Callable[[int], Recording], **_: Any) -> Any:
        return Recorded(dict.fromkeys(facts, run(0)), (0,), (tuple(facts),))

    def found() -> tuple[str, ...]:
        kind = built(DENSE)
        with patch.object(run_module, "record", of_first):
            result = rehearsed(kind.config, kind.ranks)
        return faults(result).get("offload while engines generate, and onload", ())

    return found


@pytest.mark.parametrize("part", [WEIGHTS, GRADS, OPTIMIZER])
def test_a_part_that_is_not_restored_after_offload_is_found(offload_faults, part):
    restore = DeviceMemory.restore

    def forgetful(self: DeviceMemory, *parts: str) -> dict[str, int]:
        return restore(self, *(one for one in parts if one != part))

    with patch.object(DeviceMemory, "restore", forgetful):
        found = offload_faults()
    assert found[0].startswith(f"rank 0: the {part} had ")
    assert "after a cycle have 0 bytes" in found[0]


def test_a_part_that_stays_on_the_gpu_is_found(offload_faults):
    offload = DeviceMemory.offload

    def partial_offload(self: DeviceMemory, *parts: str) -> dict[str, int]:
        return offload(self, *(one for one in parts if one != GRADS))

    assert offload_faults() == ()
    with patch.object(DeviceMemory, "offload", partial_offload):
        found = offload_faults()
    assert "of the grads stay on the device while engines generate" in found[0]
