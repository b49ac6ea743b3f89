"""Batch scripts of a fleet's engine jobs, compared as whole texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.arrays import FleetSpec
from slurm.container import Container
from slurm.render import render_fleet
from slurm.spec import JobSpec
from tests.golden.test_batch_scripts import check_bash

SPECS = {
    "fleet.sbatch": FleetSpec(
        JobSpec(
            job_name="glm45_355b-fleet",
            gpu_request="gpus-per-node",
            num_gpus_per_node=4,
            exclusive=False,
            time="08:00:00",
            partition="preempt",
            qos="scavenger",
            agent_args=("--num-gpus", "4"),
            home="/shared/runs/glm/code",
            python="/shared/venv/bin/python",
            run_folder="/shared/runs/glm",
            output="/shared/runs/glm/fleet/logs/%A_%a.batch",
        ),
        num_engines=16,
    ),
    "fleet-pyxis.sbatch": FleetSpec(
        JobSpec(
            job_name="rl-fleet",
            container=Container("pyxis", "/images/train.sqsh", ("/models",)),
            environment=(("NCCL_IB_HCA", "=mlx5_0,mlx5_1"),),
            setup_commands=("ulimit -Sn 65535",),
            requeue="never",
            home="/shared/runs/rl/code",
            python="python3",
            run_folder="/shared/runs/rl",
            output="/shared/runs/rl/fleet/logs/%A_%a.batch",
        ),
        num_engines=2,
    ),
    "fleet-hostile.sbatch": FleetSpec(
        JobSpec(
            job_name="hostile",
            num_gpus_per_node=1,
            agent_args=("$(touch x)",),
            home="/home/a; touch x",
            python="/home/$(touch x)/python",
            run_folder='/runs/$j "; touch x; #',
            output="/runs/a'; touch x #/%A_%a.batch",
        ),
        num_engines=1,
    ),
    "fleet-auto.sbatch": FleetSpec(
        JobSpec(
            job_name="auto-fleet",
            container=Container("auto", "/images/train.sqsh", ()),
            home="/shared/runs/rl/code",
            python="python3",
            run_folder="/shared/runs/rl",
            output="/shared/runs/rl/fleet/logs/%A_%a.batch",
        ),
        num_engines=1,
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_script_of_engine_jobs_is_the_one_that_was_reviewed(
    name: str, golden: Callable[[str, str], None]
) -> None:
    """The whole text equals the golden file."""
    golden(name, render_fleet(SPECS[name]))


@pytest.mark.parametrize("name", SPECS)
def test_a_script_of_engine_jobs_is_short_and_shellcheck_passes_it(name: str) -> None:
    check_bash(Path(__file__).with_name(name))
