"""Batch scripts of runs, compared as whole texts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.container import Container
from slurm.render import render_sbatch
from slurm.spec import JobSpec

SPECS = {
    "standalone.sbatch": JobSpec(
        job_name="tiny", nodes=2, gpu_request="none", driver_args=("jobs/recipes/tiny.toml",)
    ),
    "submitted.sbatch": JobSpec(
        job_name="glm45_355b",
        nodes=8,
        gpu_request="gpus-per-node",
        time="1-00:00:00",
        partition="gpu",
        account="rl",
        signal_lead_s=600,
        driver_args=("jobs/recipes/glm45_355b.toml", "--num-rollout", "3000"),
        agent_args=("--socket-ifname", "eth0"),
        home="/shared/runs/glm/code",
        python="/shared/venv/bin/python",
        run_folder="/shared/runs/glm",
        output="/shared/runs/glm/slurm-%j.out",
    ),
    "pyxis.sbatch": JobSpec(
        job_name="rl",
        nodes=4,
        spare_nodes=1,
        partition="gpu,backfill",
        account="rl",
        qos="high",
        reservation="week47",
        constraint="h100&ib",
        exclude=("gpu[001-003]", "gpu9"),
        requeue="chain",
        max_preemptions=50,
        max_failures=5,
        max_stalled_attempts=4,
        container=Container(
            "pyxis", "/images/train.sqsh", ("/models", "/data/prompts:/prompts:ro")
        ),
        environment=(("NCCL_IB_HCA", "=mlx5_0,mlx5_1"), ("NCCL_SOCKET_IFNAME", "ib0")),
        setup_commands=("ulimit -Sn 65535",),
        driver_args=("jobs/recipes/tiny.toml",),
        home="/shared/runs/rl/code",
        python="python3",
        run_folder="/shared/runs/rl",
        output="/shared/runs/rl/slurm-%j.out",
    ),
    "enroot.sbatch": JobSpec(
        job_name="rl",
        exclusive=False,
        gpu_request="none",
        requeue="never",
        container=Container(
            "enroot", "nvcr.io/nvidia/pytorch:25.01-py3", ("/models",), "/shared/images"
        ),
        driver_args=("jobs/recipes/tiny.toml",),
    ),
    "auto.sbatch": JobSpec(
        job_name="rl",
        nodes=4,
        container=Container(
            "auto", "$RLPOST_IMAGE", ("$RLPOST_ASSETS", "/data/prompts:/prompts:ro")
        ),
        environment=(("NCCL_IB_HCA", "=mlx5_0,mlx5_1"),),
        setup_commands=("ulimit -Sn 65535",),
        requeue="chain",
        driver_args=("jobs/recipes/qwen3_4b.toml", "--cluster", "site"),
    ),
    "hostile.sbatch": JobSpec(
        job_name="hostile",
        num_gpus_per_node=1,
        driver_args=("a'; touch x", "$(touch x)", "`touch x`", "# x", ""),
        environment=(("MARK", "a'; touch x $(touch x)"),),
        setup_commands=("a'; touch x", "$(touch x) # x"),
        home="/home/a'; touch x",
        python="/home/$(touch x)/python",
        run_folder='/runs/$j "; touch x; #',
        output="/runs/a'; touch x #/slurm-%j.out",
    ),
}

# Lines of a script that submits itself and refuses flags that are part of its text.
ONLY_STANDALONE = ('[ "${SLURM_JOB_ID:-}" ]', "bash slurm/cluster_flags.sh")


@pytest.mark.parametrize("name", SPECS)
def test_a_batch_script_is_the_one_that_was_reviewed(
    name: str, golden: Callable[[str, str], None]
) -> None:
    """The whole text equals the golden file."""
    golden(name, render_sbatch(SPECS[name]))


@pytest.mark.parametrize("name", SPECS)
def test_a_batch_script_is_at_most_80_lines_of_bash_that_shellcheck_passes(name: str) -> None:
    script = Path(__file__).with_name(name)
    assert len(script.read_text().splitlines()) <= 80
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; on Debian: apt-get install shellcheck")
    # These three warn that quoted text stays literal, which is intended for hostile values.
    exclude = ["--exclude=SC2016,SC2089,SC2090"] if name == "hostile.sbatch" else []
    checked = subprocess.run(["shellcheck", *exclude, script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_both_uses_of_the_script_have_the_same_structure() -> None:
    """Only the lines that set paths differ between given paths and those found at run time."""
    common = {"job_name": "tiny", "driver_args": ("recipe.toml",)}
    found = render_sbatch(JobSpec(**common)).splitlines()
    found = [line for line in found if not line.startswith(ONLY_STANDALONE)]
    given = render_sbatch(JobSpec(**common, home="/h", python="/p", run_folder="/r")).splitlines()
    differing = [a.partition("=")[0] for a, b in zip(found, given, strict=True) if a != b]
    assert differing == ["RLPOST_HOME", "python", "run_folder"]
