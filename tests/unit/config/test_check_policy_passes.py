"""All passes of a policy compute the same policy: what makes them differ is refused but for SFT."""

from __future__ import annotations

import ast
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.checks.policy_passes import DIFFERS, SAMPLES, pass_problems
from rlpost.config.flags import fields
from rlpost.config.load import load
from rlpost.config.megatron_options import CLASSES, OURS
from rlpost.config.model_arguments import NAMES
from rlpost.config.tree import Config

SFT = {"loss_type": "sft_loss"}
HARMLESS = {
    "bias_dropout_fusion": "fuses an addition; the probability is 0",
    "inference_fuse_tp_communication": "of layers that use_inference_optimized_layers selects",
    "inference_rng_tracker": "of Megatron's inference engine, which is not used",
    "inference_sampling_seed": "of Megatron's inference engine",
    "moe_pad_expert_input_to_capacity": "needs moe_expert_capacity_factor",
    "moe_token_drop_policy": "needs moe_expert_capacity_factor",
    "moe_token_dropping": "needs moe_expert_capacity_factor",
}
"""Fields of Megatron-core whose words suggest that passes differ, and why they do not."""
SUSPECT = re.compile(r"dropout|jitter|noise|random|stochastic|drop|capacity|inference|decod", re.I)


def config(**groups: Any) -> Config:
    return load([], groups).config


@pytest.mark.parametrize("name", DIFFERS)
def test_an_option_with_which_passes_differ_is_refused_with_every_loss_but_that_of_sft(
    name: str,
) -> None:
    for grpo in ({}, {"loss_type": "custom_loss"}):
        (problem,) = pass_problems(config(megatron={name: True}, grpo=grpo))
        flag = "--" + name.replace("_", "-")
        assert problem.startswith(f"{flag} true with --loss-type") and "leave it out" in problem
    assert pass_problems(config(megatron={name: True}, grpo=SFT)) == []
    assert pass_problems(config(megatron={name: False})) == []


@pytest.mark.parametrize("name", SAMPLES)
def test_an_engine_that_answers_otherwise_than_the_policy_is_refused(name: str) -> None:
    """mmcdermott/MEDS_EIC_AR#171: an engine cuts a long prompt, and says so in its log alone."""
    allowed, _ = SAMPLES[name]
    other = {"repetition_penalty": 1.05} if allowed is None else not allowed or 0.5
    (problem,) = pass_problems(config(sglang={f"sglang_{name}": other}))
    flag = "--sglang-" + name.replace("_", "-")
    assert problem.startswith(f"{flag} ") and problem.endswith("; leave it out")
    for value in (allowed, None):
        assert (
            pass_problems(config(sglang={} if value is None else {f"sglang_{name}": value})) == []
        )
    assert pass_problems(config(sglang={f"sglang_{name}": other}, grpo=SFT)) == []
    for mode in ("debug_rollout_only", "debug_train_only"):
        assert pass_problems(config(sglang={f"sglang_{name}": other}, debug={mode: True})) == []


def test_dropout_of_adapters_is_for_sft() -> None:
    lora = {"lora_rank": 8, "lora_dropout": 0.1}
    (problem,) = pass_problems(config(lora=lora))
    assert problem.startswith("--lora-dropout 0.1 with --loss-type policy_loss")
    assert problem.endswith("use --lora-dropout 0")
    assert pass_problems(config(lora=lora, grpo=SFT)) == []
    assert pass_problems(config(lora=lora | {"lora_dropout": 0.0})) == []


def test_every_suspect_option_of_megatron_core_is_known() -> None:
    """By its name or description; a new version of Megatron-core adds rows."""
    spec = PathFinder.find_spec("megatron")
    if spec is None:
        pytest.skip("Megatron-core is not installed")
    (folder,) = spec.submodule_search_locations or ()
    source = (Path(folder) / "core" / CLASSES["TransformerConfig"]).read_text()
    suspects = set()
    for kind in ast.walk(ast.parse(source)):
        if not isinstance(kind, ast.ClassDef):
            continue
        for field, after in zip(kind.body, [*kind.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                described = ast.unparse(after) if isinstance(after, ast.Expr) else ""
                first_sentence = described.partition(".")[0]
                if SUSPECT.search(f"{field.target.id} {first_sentence}"):
                    suspects.add(field.target.id)
    assert {"moe_input_jitter_eps", "hidden_dropout"} <= suspects
    known = {*DIFFERS, *HARMLESS, *OURS, *fields(), *NAMES}
    assert sorted(suspects - known) == []
    assert set(HARMLESS) <= suspects
