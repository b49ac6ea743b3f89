"""Settings of adapters that have no effect, or that exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from rlpost.config.checks.lora import lora_model_problems, lora_problems
from rlpost.config.checks.optimizer import optimizer_problems
from rlpost.config.load import load
from rlpost.config.tree import Config

LORA = {"lora_rank": 8}
MUON = {"optimizer": "muon"}
WHOLE = {"use_distributed_optimizer": False}


def config(**groups: Any) -> Config:
    return load([], groups).config


def test_adapters_at_every_layer_and_their_defaults_have_no_problems():
    targets = ("linear_qkv", "experts")
    for lora in ({}, LORA, LORA | {"lora_targets": targets, "lora_dropout": 0.1}):
        assert lora_problems(config(lora=lora)) == []


def test_targets_that_the_model_lacks_are_named():
    given = config(lora=LORA | {"lora_targets": "experts"})
    assert lora_model_problems(given, {"n_routed_experts": 8}) == []
    (problem,) = lora_model_problems(given, {"hidden_size": 8})
    assert "--lora-targets experts: the model's config.json has no routed experts" in problem


def test_adapters_that_peft_would_drop_are_not_exported_for_it():
    save = {"save_hf": "/there"}
    peft = config(lora=LORA | {"lora_export": "peft"}, checkpoint=save)
    (problem,) = lora_model_problems(peft, {"n_routed_experts": 8})
    assert problem.startswith("--lora-export peft with --lora-targets linear_qkv linear_proj")
    assert "--lora-export merged" in problem
    assert lora_model_problems(peft, {"hidden_size": 8}) == []
    attention = {"lora_export": "peft", "lora_targets": ["linear_qkv", "linear_proj"]}
    of_attention = config(lora=LORA | attention, checkpoint=save)
    assert lora_model_problems(of_attention, {"n_routed_experts": 8}) == []


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "GptOssForCausalLM"])
def test_architectures_without_adapters_are_refused(architecture):
    model = {"architectures": [architecture]}
    (problem,) = lora_model_problems(config(lora=LORA), model)
    assert (
        f"--lora-rank 8: adapters do not exist for the attention or the experts of {architecture}"
        in problem
    )
    assert lora_model_problems(config(), model) == []


def test_a_family_of_another_package_has_adapters_only_if_it_says_so(monkeypatch, tmp_path):
    (tmp_path / "my_family.py").write_text(
        "from rlpost.models.families import FAMILIES\n"
        "from dataclasses import replace\n"
        'LATENT = FAMILIES["DeepseekV3ForCausalLM"]\n'
        "TESTED = replace(LATENT, adapters=True)\n"
    )
    info = tmp_path / "my_family-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: my-family\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[rlpost.families]\nMyLatentForCausalLM = my_family:LATENT\n"
        "MyTestedForCausalLM = my_family:TESTED\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = config(lora=LORA)
    (problem,) = lora_model_problems(given, {"architectures": ["MyLatentForCausalLM"]})
    assert "adapters do not exist" in problem and "MyLatentForCausalLM" in problem
    assert lora_model_problems(given, {"architectures": ["MyTestedForCausalLM"]}) == []


def test_what_has_no_adapters_beside_the_policy_is_refused():
    """The critic, and a reference that would change."""
    ppo = config(lora=LORA, grpo={"advantage_estimator": "ppo"})
    assert any("--advantage-estimator ppo with --lora-rank 8" in one for one in lora_problems(ppo))
    overlaps = config(lora=LORA, megatron={"moe_shared_expert_overlap": True})
    assert any("gathered rows" in one for one in lora_problems(overlaps))
    updated = config(lora=LORA, grpo={"use_kl_loss": True, "ref_update_interval": 2})
    assert any(
        "--ref-update-interval 2 with --lora-rank 8" in one for one in lora_problems(updated)
    )


def test_muon_and_patterns_alone_have_no_problems():
    patterns = {"freeze_params_name_list": [r"layers\.[0-3]\.", "embedding"]}
    assert optimizer_problems(config(optimizer=MUON | patterns, perf=WHOLE)) == []
