"""The contents of adapter_config.json."""

from __future__ import annotations

import torch

from rlpost.trainer.weights.low_rank import LowRank, is_adapter
from rlpost.trainer.weights.peft_folder import PREFIX, PeftSettings, peft_config, template

SETTINGS = PeftSettings(base="/base", rank=4, alpha=8.0, dropout=0.1, adapted=frozenset())


def config_of(adapted: list[str], others: list[str]) -> dict[str, object]:
    tensors = {f"{PREFIX}{name}.lora_B.weight": torch.zeros(2, 4) for name in adapted}
    return peft_config(tensors, SETTINGS, all_modules={*adapted, *others})


def test_targets_are_short_names_where_every_such_module_has_an_adapter():
    found = config_of(["layers.0.q_proj", "layers.1.q_proj"], ["lm_head", "layers.0.o_proj"])
    assert found["target_modules"] == ["q_proj"]
    assert (found["r"], found["base_model_name_or_path"]) == (4, "/base")
    assert found["lora_alpha"] == 8 and isinstance(found["lora_alpha"], int)


def test_targets_are_the_shortest_ends_of_names_that_no_other_module_has():
    """Shared experts and the first layer have adapters, routed experts have none."""
    shared = [f"layers.{layer}.mlp.shared_experts.up_proj" for layer in (1, 12)]
    routed = [f"layers.{layer}.mlp.experts.0.up_proj" for layer in (1, 12)]
    found = config_of([*shared, "layers.0.mlp.up_proj"], routed)["target_modules"]
    assert found == ["mlp.up_proj", "shared_experts.up_proj"]
    first, second = "layers.1.q_proj", "layers.11.q_proj"
    assert config_of([first], [second])["target_modules"] == ["1.q_proj"]


def test_names_of_megatron_lose_their_numbers():
    name = "decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight"
    assert template(name) == "decoder.layers.#.mlp.experts.local_experts.#.linear_fc1.weight"
    assert is_adapter("decoder.layers.3.mlp.linear_fc1.lora_a") and not is_adapter(name)


def test_a_merged_weight_is_rounded_once_in_its_own_type():
    """Against float64: half a unit in the last place of bfloat16."""
    torch.manual_seed(0)
    weight = torch.randn(6, 5).bfloat16()
    a, b = torch.nn.Parameter(torch.randn(2, 5)), torch.nn.Parameter(torch.randn(6, 2))
    found = LowRank(a, b, 0.5).merged(weight)
    exact = weight.double() + 0.5 * (b.double() @ a.double())
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8).all()
