"""LoRA with real Megatron over gloo: layouts, the base model, exports and resumes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from tests.contract.actor_ranks import Files, run_ranks, train
from tests.contract.families import load_folder, make_family
from tests.contract.layouts import CP2, FULL, ep, pp, tp
from tests.contract.lora_ranks import look_at_adapters, train_adapters
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

RANK, ALPHA = 4, 8.0
LIMIT = 1e-5
FACTOR_LIMIT = 1e-3
"""Relative to the largest value of a factor.

Three steps of Adam divide small gradients by their own size, which magnifies rounding.
"""
ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "experts")
DENSE, MOE = "qwen3", "glm4.5-moe"
TARGETS = {DENSE: ALL[:-1], MOE: ALL}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name in (DENSE, MOE):
        make_family(folder / name, name)
    return folder


def settings(folder: Path, model: str, **more: Any) -> Config:
    given: dict[str, Any] = {"lora_targets": TARGETS[model], **more}
    return rank_config(
        str(folder / model),
        lr=1e-2,
        adam_eps=1e-4,
        distributed_timeout_minutes=2,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        **given,
    )


@pytest.fixture(scope="module")
def dense(folder: Path) -> dict[str, Any]:
    """Train the dense model in one process, which saves and exports into the folder."""
    given = settings(folder, DENSE)
    (found,) = run_ranks(look_at_adapters, 1, given, steps=STEPS, folder=str(folder))
    return found


@pytest.fixture(scope="module")
def sparse(folder: Path) -> dict[str, Any]:
    """Train the mixture of experts in one process."""
    (found,) = run_ranks(train_adapters, 1, settings(folder, MOE), steps=STEPS)
    return found


LAYOUTS = {
    "tp2-sp-pp2": (DENSE, 4, tp(2) | pp(2) | {"recompute_granularity": "full"}
                   | {"recompute_method": "uniform", "recompute_num_layers": 1}),
    "moe-cp2-ep2": (MOE, 2, CP2 | ep(2)),
    "moe-tp2-sp-etp2": (MOE, 2, tp(2) | ep(1, 2)),
    "moe-tp2-sp-ep2-etp1": (MOE, 2, tp(2) | ep(2, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_at_every_layout_as_in_one_process(folder, request, name):
    """Loss, gradient norm and all factors after three steps; relative, in float32."""
    model, num_ranks, layout = LAYOUTS[name]
    found = run_ranks(train_adapters, num_ranks, settings(folder, model, **layout), steps=STEPS)
    expected = request.getfixturevalue("dense" if model == DENSE else "sparse")
    assert len({one["hash"] for one in found}) == 1, "every rank exports the same merged weights"
    for ours, theirs in zip(found[0]["metrics"], expected["metrics"], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=LIMIT, abs=1e-6)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=LIMIT)
    ours, theirs = found[0]["adapters"], expected["adapters"]
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert np.abs(ours[key] - value).max() <= FACTOR_LIMIT * np.abs(value).max(), key


def test_an_adapter_starts_as_the_base_and_only_adapters_are_trained_and_saved(dense):
    """B is zero, so the logits are bitwise those of the base.

    The checkpoint has two factors for each adapted module, and three states of the optimizer for
    each factor.
    """
    assert np.array_equal(dense["adapted before"], dense["base"])
    assert np.array_equal(dense["base after"], dense["base"])
    assert np.abs(dense["adapted after"] - dense["base"]).max() > 0.1
    hidden, ffn, columns, layers = 64, 96, (4 + 2 * 2) * 16, 4
    sizes = (hidden + columns, 4 * 16 + hidden, hidden + 2 * ffn, ffn + hidden)
    count = layers * RANK * sum(sizes)
    assert dense["trained"] == count
    assert dense["num_saved"] == dict.fromkeys(("weights", "param", "exp_avg", "exp_avg_sq"), count)


def test_the_reference_is_the_base(dense):
    """The log-probs of the reference after training are those of the policy before it."""
    assert dense["reference logprobs"] == dense["base logprobs"]


def test_merged_weights_compute_what_adapters_compute(folder, dense):
    """The exported folder in transformers is compared with Megatron with adapters."""
    ours = dense["adapted after"]
    assert np.abs(ours - hf_logits(folder / "merged")).max() < 1e-5 * np.abs(ours).max()


def test_the_peft_folder_has_the_update_of_every_merged_weight(folder, dense):
    """PEFT's rule, W + alpha / r B A for each module, gives the merged folder.

    Modules without an adapter are unchanged.
    """
    base, merged = load_folder(folder / DENSE), load_folder(folder / "merged")
    factors = load_file(folder / "peft/adapter_model.safetensors")
    config = json.loads((folder / "peft/adapter_config.json").read_text())
    assert config["r"] == RANK and config["lora_alpha"] == ALPHA
    assert config["target_modules"] == sorted(
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in factors:
            b, a = factors.pop(f"{module}.lora_B.weight"), factors.pop(f"{module}.lora_A.weight")
            weight = weight + config["lora_alpha"] / config["r"] * (b @ a)
        assert torch.allclose(merged[name], weight, rtol=0, atol=1e-6), name
    assert not factors, "factors of modules that the model does not have"


@pytest.fixture(scope="module")
def sparse_export(folder: Path) -> dict[str, Any]:
    """Train attention of the mixture of experts: the targets that may be exported for PEFT."""
    given = settings(folder, MOE, lora_targets=ALL[:2])
    own = folder / "sparse"
    (found,) = run_ranks(look_at_adapters, 1, given, steps=STEPS, folder=str(own))
    return found


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(
    ("model", "trained", "own"), [(DENSE, "dense", "."), (MOE, "sparse_export", "sparse")]
)
def test_peft_loads_the_folder_with_equal_logits(folder, request, recwarn, model, trained, own):
    """Every adapter is used; PEFT only warns about those that it drops."""
    import peft
    import transformers

    ours = request.getfixturevalue(trained)["adapted after"]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / model)
    adapted = peft.PeftModel.from_pretrained(base, folder / own / "peft")
    assert not [one for one in recwarn if "adapter keys" in str(one.message)]
    assert np.abs(ours - logits_of(adapted)).max() < 1e-5 * np.abs(ours).max()


def hf_logits(folder: Path) -> np.ndarray:
    import transformers

    return logits_of(transformers.AutoModelForCausalLM.from_pretrained(folder))


def logits_of(model: Any) -> np.ndarray:
    """Return the logits of the first step's samples, one after another: [T, vocabulary]."""
    with torch.no_grad():
        rows = [
            model(torch.tensor([list(sample.token_ids)])).logits[0].numpy() for sample in STEPS[0]
        ]
    return np.concatenate(rows)


def test_a_run_with_dropout_is_resumed_bit_for_bit(folder, tmp_path):
    """Dropout masks of the resumed run are those of the uninterrupted run.

    The run has two tensor-parallel ranks.
    """
    given = settings(folder, DENSE, **tp(2), lora_dropout=0.2, bf16=True)
    saved = str(tmp_path / "saved")
    whole = run_ranks(train_adapters, 2, given, steps=STEPS, files=Files(save=saved))
    resumed = run_ranks(train_adapters, 2, given, steps=STEPS, files=Files(load=saved))
    assert resumed[0]["metrics"] == whole[0]["metrics"][2:]
    assert resumed[0]["hash"] == whole[0]["hash"]
    without = with_values(given, lora_dropout=0.0)
    plain = run_ranks(train, 2, without, steps=STEPS)
    assert plain[0]["hash"] != whole[0]["hash"], "dropout has an effect"


def test_recomputed_activations_have_the_dropout_masks_of_the_forward_pass(folder):
    given = settings(folder, DENSE, **tp(2), lora_dropout=0.2)
    kept = run_ranks(train_adapters, 2, given, steps=STEPS)
    recomputed = run_ranks(train_adapters, 2, with_values(given, **FULL), steps=STEPS)
    assert recomputed[0]["metrics"] == kept[0]["metrics"]
    assert recomputed[0]["hash"] == kept[0]["hash"]


def test_a_checkpoint_of_other_adapters_is_refused(folder, dense):
    """The error names the settings of both, and the remedy."""
    other = with_values(settings(folder, DENSE), lora_rank=2)
    with pytest.raises(AssertionError, match=r"has LoRA adapters of .*'lora_rank': 4.* use those"):
        run_ranks(train, 1, other, steps=STEPS, files=Files(load=str(folder / "saved")))
