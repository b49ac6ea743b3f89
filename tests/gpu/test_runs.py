"""Small complete runs through ``rlpost.submit``, on one GPU and on two.

A trainer process and a real SGLang engine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlpost.observe.writer import read_metrics
from tests.gpu.models import make_gpu_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.needs("sglang", "ray")]
ROOT = Path(__file__).parents[2]
NUM_STEPS = 3
DEADLINE_S = 900
CLOSE = {"cuda": 0.1, "cpu": 1e-3}
"""Limit of the mean difference of log-probs between trainer and engine with the same weights.

Both compute in bfloat16 on CUDA and in float32 on a CPU.
"""
ONE_GPU = ("--num-gpus-per-node", "1", "--actor-num-gpus-per-node", "1", "--colocate")
TWO_GPUS = ("--num-gpus-per-node", "2", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpu_model(tmp_path_factory.mktemp("runs") / "model")


def submit_words(model: Path, folder: Path, device: str, *flags: str) -> list[str]:
    """Return the command of a run: the tiny recipe with one trainer rank and one engine."""
    prompts = str(model / "train.jsonl")
    of_engine = ("--sglang-mem-fraction-static", "0.4") if device == "cuda" else ()
    return [
        *(
            sys.executable,
            "-m",
            "rlpost.submit",
            "jobs/recipes/tiny.toml",
            "--local",
            "--run-folder",
            str(folder),
        ),
        *(
            "--hf-checkpoint",
            str(model),
            "--prompt-data",
            prompts,
            "--eval-prompt-data",
            "heldout",
            f"{prompts}@[0:4]",
        ),
        *(
            "--num-rollout",
            str(NUM_STEPS),
            "--rollout-batch-size",
            "8",
            "--n-samples-per-prompt",
            "4",
        ),
        *(
            "--rm-type",
            "random",
            "--tensor-model-parallel-size",
            "1",
            "--sequence-parallel",
            "false",
        ),
        *("--save-interval", str(NUM_STEPS)),
        *of_engine,
        *flags,
    ]


def trained(command: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """Run a command that must succeed; return the metrics of its steps."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["step"] > 0]


def assert_both_sides_compute_alike(lines: Sequence[dict[str, float]], device: str) -> None:
    for line in lines:
        assert line["train/grad_norm"] > 0.0
        assert line["train/rollout_logprob_abs_diff"] < CLOSE[device], (
            f"step {line['step']}: not the same weights"
        )


def figures(lines: Sequence[dict[str, float]]) -> str:
    last = lines[-1]
    return f"step {last['time/step_s']:.1f} s, log-probs differ by {last['train/rollout_logprob_abs_diff']:.4f}"


def test_trainer_and_engine_share_one_gpu_and_the_run_resumes(
    model: Path, tmp_path: Path, device: str, record_property
) -> None:
    """Three steps with CUDA IPC, the memory saver and offloading.

    Two more steps are trained from the checkpoint.
    """
    folder = tmp_path / "run"
    lines = trained(submit_words(model, folder, device, *ONE_GPU), folder)
    record_property("figure", figures(lines))
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert_both_sides_compute_alike(lines, device)
    log = (folder / "attempts/0/actor-0.log").read_text()
    assert "offloaded weights" in log and "restored weights" in log
    more = str(NUM_STEPS + 2)
    lines = trained(
        submit_words(model, folder, device, *ONE_GPU, "--num-rollout", more, "--resume"), folder
    )
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 3))
    assert_both_sides_compute_alike(lines, device)


@pytest.mark.needs(gpus=2)
def test_an_engine_on_its_own_gpu_gets_the_weights_by_broadcast(
    model: Path, tmp_path: Path, device: str, record_property
) -> None:
    folder = tmp_path / "run"
    lines = trained(submit_words(model, folder, device, *TWO_GPUS), folder)
    record_property("figure", figures(lines))
    assert_both_sides_compute_alike(lines, device)
