"""Batch scripts of sandbox servers, compared as whole texts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.arrays import SandboxSpec
from slurm.container import Container
from slurm.errors import SpecError
from slurm.render import render_sandbox
from slurm.spec import JobSpec
from tests.golden.test_batch_scripts import check_bash

JOB = JobSpec(
    job_name="coder-sandboxes",
    gpu_request="none",
    exclusive=False,
    time="1-00:00:00",
    partition="cpu",
    home="/shared/runs/coder/code",
    python="/shared/venv/bin/python",
    run_folder="/shared/runs/coder",
    output="/shared/runs/coder/sandboxes/logs/%A_%a.batch",
)
HOSTILE = replace(
    JOB,
    job_name="hostile",
    home="/home/a; touch x",
    python="/home/$(touch x)/python",
    run_folder='/runs/$j "; touch x; #',
    output="/runs/a'; touch x #/%A_%a.batch",
    requeue="never",
)
SPECS = {
    "sandbox.sbatch": SandboxSpec(
        JOB,
        8,
        places=32,
        warm=4,
        cores=32,
        memory_mib=65536,
        image="/images/swe bench.sqsh",
        read_only=("/shared/tools",),
        after="4711",
    ),
    "sandbox-hostile.sbatch": SandboxSpec(HOSTILE, 1, places=1, image="/a'; $(touch x); #"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_script_of_sandbox_servers_is_the_one_that_was_reviewed(
    name: str, golden: Callable[[str, str], None]
) -> None:
    golden(name, render_sandbox(SPECS[name]))


@pytest.mark.parametrize("name", SPECS)
def test_a_script_of_sandbox_servers_is_valid_bash_and_executes_none_of_its_values(
    name: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(render_sandbox(SPECS[name]))
    check_bash(script)
    subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, timeout=20)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_servers": 0}, "num_servers"),
        ({"places": 0}, "places"),
        ({"job": replace(JOB, gpu_request="gres")}, "no GPU"),
        ({"job": replace(JOB, container=Container("pyxis", "/a.sqsh", ()))}, "container"),
        ({"job": replace(JOB, requeue="chain")}, "chain"),
        ({"job": replace(JOB, run_folder=None)}, "run_folder"),
        ({"image": "a\nb"}, "control character"),
        ({"after": "1;x"}, "not the number"),
    ],
)
def test_an_invalid_server_is_refused(change: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPECS["sandbox.sbatch"], **change)
