"""The actor on the device: families against transformers, training against the CPU.

The models are made here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from rlpost.config.groups.perf import FP8_ROWS
from rlpost.models.fp8 import grid_of
from rlpost.trainer import fp8_grid
from tests.contract.actor_ranks import look, run_ranks, train
from tests.contract.families import FAMILIES, make_family
from tests.contract.local_layers import use_local_layers
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(600)
SAMPLES = STEPS[0]
TRAINED = "qwen3", "glm4.5-moe"


@pytest.fixture(scope="module")
def torch_references() -> None:
    """Let transformers compute linear attention in torch.

    With a GPU and fla-core it would use kernels, also for references on the CPU, and create norms
    on the GPU.
    """
    from transformers.utils import import_utils

    with mock.patch.object(import_utils, "is_flash_linear_attention_available", lambda: False):
        from transformers.models.qwen3_5 import modeling_qwen3_5
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
        from transformers.models.qwen3_next import modeling_qwen3_next
    modules = (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next)
    assert all(module.FusedRMSNormGated is None for module in modules)


@pytest.fixture(scope="module")
def folders(torch_references: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a tiny random model of each family."""
    made = {name: tmp_path_factory.mktemp("families") / name for name in FAMILIES}
    for name, folder in made.items():
        make_family(folder, name)
    return made


def hf_logits(folder: Path, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return transformers' logits of the samples, computed one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        .to(device)
        .eval()
    )
    with torch.no_grad():
        rows = [
            model(torch.tensor([sample.token_ids], device=device)).logits[0] for sample in SAMPLES
        ]
    return torch.cat(rows).float().cpu()


def our_logits(
    folder: Path, export: Path, *, implementation: str = "local", **changes: object
) -> torch.Tensor:
    settings = rank_config(str(folder), distributed_timeout_minutes=2, **changes)
    before = use_local_layers if implementation == "local" else None
    (seen,) = run_ranks(look, 1, settings, before=before, samples=SAMPLES, export=str(export))
    return torch.from_numpy(seen["logits"])[: sum(len(sample.token_ids) for sample in SAMPLES)]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_logits_in_float32_equal_those_of_transformers(folders, tmp_path, device, name):
    expected = hf_logits(folders[name], torch.float32, "cpu")
    ours = our_logits(folders[name], tmp_path, bf16=False)
    assert (ours - expected).abs().max().item() < (1e-5 if device == "cpu" else 1e-4) * max(
        1, expected.abs().max()
    )


@pytest.mark.parametrize(
    "implementation",
    [
        "local",
        pytest.param(
            "transformer_engine", marks=pytest.mark.needs("transformer-engine", cuda=True)
        ),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_logits_in_bfloat16_are_as_close_to_float32_as_those_of_transformers(
    folders, tmp_path, device, name, implementation
):
    """The median error is at most twice that of transformers.

    Not the largest error: a rounding may change the choice of an expert.
    """
    exact = hf_logits(folders[name], torch.float32, "cpu")
    theirs = (hf_logits(folders[name], torch.bfloat16, device) - exact).abs().median()
    logits = our_logits(folders[name], tmp_path, implementation=implementation, bf16=True)
    ours = (logits - exact).abs().median()
    assert 0 < ours <= 2 * theirs


def trained(folder: Path, **changes: object) -> list[dict[str, float]]:
    """Train three steps; return their metrics.

    TransformerEngine's fast kernels need 16 bits, so float32 uses the local implementation.
    """
    settings = rank_config(
        str(folder), lr=1e-3, adam_eps=1e-4, distributed_timeout_minutes=2, **changes
    )
    before = None if changes["bf16"] else use_local_layers
    (found,) = run_ranks(train, 1, settings, before=before, steps=STEPS)
    return found["metrics"]


@pytest.mark.parametrize("name", TRAINED)
def test_three_steps_in_float32_match_those_on_the_cpu(folders, tmp_path, name):
    """The metrics of the CPU come from a process that sees no GPU."""
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.gpu.test_actor", str(folders[name])]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.splitlines()[-1])
    for found, wanted in zip(trained(folders[name], bf16=False), expected, strict=True):
        assert found == pytest.approx(wanted, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_three_steps_in_bfloat16_are_close_to_those_in_float32(folders, name):
    for found, wanted in zip(
        trained(folders[name], bf16=True), trained(folders[name], bf16=False), strict=True
    ):
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.2)
        assert found["train/loss"] == pytest.approx(wanted["train/loss"], rel=0.2, abs=0.05)


@pytest.mark.needs("transformer-engine", cuda=True)
@pytest.mark.parametrize("recipe", FP8_ROWS)
@pytest.mark.parametrize("name", TRAINED)
def test_three_steps_in_fp8_are_close_to_those_in_bfloat16(folders, monkeypatch, name, recipe):
    capability = torch.cuda.get_device_capability()
    if recipe not in grid_of(capability).trains:
        pytest.skip(f"TransformerEngine has no products of {recipe} for this GPU, {capability}")
    monkeypatch.setenv(fp8_grid.USED, "1")  # ranks are spawned, and import with it
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe}
    for found, wanted in zip(
        trained(folders[name], bf16=True, megatron=fp8),
        trained(folders[name], bf16=True),
        strict=True,
    ):
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.3)


def test_log_probs_are_the_same_in_chunks_of_any_size(folders, tmp_path):
    """In chunks of seven rows, and in one chunk."""
    found = []
    for chunk in (7, 100_000):
        settings = rank_config(str(folders["qwen3"]), bf16=False, log_probs_chunk_size=chunk)
        (seen,) = run_ranks(
            look, 1, settings, before=use_local_layers, samples=SAMPLES, export=str(tmp_path)
        )
        found.append(
            [
                value
                for micro_batch in seen["logprobs"]
                for sample in micro_batch
                for value in sample
            ]
        )
    assert found[0] == pytest.approx(found[1], abs=1e-6)


if __name__ == "__main__":
    print(json.dumps(trained(Path(sys.argv[1]), bf16=False)))
