"""Batch scripts of every kind of job, compared as whole texts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlpost.config.load import JOBS
from slurm.arrays import FleetSpec, SandboxSpec
from slurm.container import Container
from slurm.errors import SpecError
from slurm.render import (
    render_conversion,
    render_fleet,
    render_look,
    render_sandbox,
    render_sbatch,
)
from tests.settings import a_job

RUNS = {
    "standalone.sbatch": a_job(
        job_name="tiny",
        nodes=2,
        gpu_request="none",
        driver_args=("jobs/recipes/tiny.toml",),
        agent_args=("--requirements", "$RLPOST_ASSETS/tiny"),
    ),
    "submitted.sbatch": a_job(
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
    "pyxis.sbatch": a_job(
        job_name="rl",
        nodes=4,
        spare_nodes=1,
        segment=5,
        partition="gpu,backfill",
        account="rl",
        qos="high",
        reservation="week47",
        constraint="h100&ib",
        exclude=("gpu[001-003]", "gpu9"),
        sbatch=("--licenses=site:8", "--comment=nightly run #7"),
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
    "enroot.sbatch": a_job(
        job_name="rl",
        exclusive=False,
        gpu_request="none",
        requeue="never",
        container=Container(
            "enroot", "nvcr.io/nvidia/pytorch:25.01-py3", ("/models",), "/shared/images"
        ),
        driver_args=("jobs/recipes/tiny.toml",),
    ),
    "auto.sbatch": a_job(
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
    "hostile.sbatch": a_job(
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

FLEETS = {
    "fleet.sbatch": FleetSpec(
        a_job(
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
        after="4711",
    ),
    "fleet-pyxis.sbatch": FleetSpec(
        a_job(
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
        a_job(
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
        a_job(
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

SERVERS_JOB = a_job(
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
    SERVERS_JOB,
    job_name="hostile",
    home="/home/a; touch x",
    python="/home/$(touch x)/python",
    run_folder='/runs/$j "; touch x; #',
    output="/runs/a'; touch x #/%A_%a.batch",
    requeue="never",
)
SERVERS = {
    "sandbox.sbatch": SandboxSpec(
        SERVERS_JOB,
        8,
        places=32,
        module="pkg.sandbox_server",
        warm=4,
        cores=32,
        memory_mib=65536,
        image="/images/swe bench.sqsh",
        read_only=("/shared/tools",),
        after="4711",
    ),
    "sandbox-hostile.sbatch": SandboxSpec(
        HOSTILE, 1, places=1, module="pkg.sandbox_server", image="/a'; $(touch x); #"
    ),
}
ONCE = a_job(
    job_name="convert",
    nodes=2,
    driver_args=("--model", "glm45_355b", "--hf-checkpoint", "$RLPOST_IMAGE_CACHE/GLM"),
)
SCRIPTS: dict[str, Callable[[], str]] = {
    **{name: partial(render_sbatch, spec) for name, spec in RUNS.items()},
    **{name: partial(render_fleet, spec) for name, spec in FLEETS.items()},
    **{name: partial(render_sandbox, spec) for name, spec in SERVERS.items()},
    "convert.sbatch": partial(render_conversion, ONCE, "$RLPOST_ASSETS/GLM_torch_dist"),
    "doctor.sbatch": partial(render_look, ONCE),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_batch_script_is_the_one_that_was_reviewed(
    name: str, golden: Callable[[str, str], None]
) -> None:
    """The whole text equals the golden file."""
    golden(name, SCRIPTS[name]())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_batch_script_is_at_most_30_lines_of_bash_that_shellcheck_passes(name: str) -> None:
    check_bash(Path(__file__).with_name(name))


@pytest.mark.parametrize("name", [name for name in SCRIPTS if "hostile" in name])
def test_a_batch_script_executes_none_of_its_values(name: str, tmp_path: Path) -> None:
    subprocess.run(["bash"], input=SCRIPTS[name]().encode(), cwd=tmp_path, timeout=20)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_servers": 0}, "num_servers"),
        ({"places": 0}, "places"),
        ({"job": replace(SERVERS_JOB, gpu_request="gres")}, "no GPU"),
        ({"job": replace(SERVERS_JOB, container=Container("pyxis", "/a.sqsh", ()))}, "container"),
        ({"job": replace(SERVERS_JOB, requeue="chain")}, "chain"),
        ({"job": replace(SERVERS_JOB, run_folder=None)}, "run_folder"),
        ({"image": "a\nb"}, "control character"),
        ({"after": "1;x"}, "not the number"),
    ],
)
def test_an_invalid_server_is_refused(change: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SERVERS["sandbox.sbatch"], **change)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.sbatch")), ids=lambda path: path.stem)
def test_a_user_can_read_a_batch_file_of_the_project(path: Path) -> None:
    """Its directives, the variables that it reads with what they mean, and one command."""
    check_bash(path)
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 100
    named = set(re.findall(r"(?m)^#   (RLPOST_\w+) +\S", text))
    read = set(re.findall(r"\$\{?(RLPOST_\w+)", text))
    assert read <= named and "()" not in text
    assert text.count("exec python3 -m slurm.batch") == 1


def test_both_uses_of_the_script_have_the_same_structure() -> None:
    """Only paths, and the help for a user, differ between given paths and those found at run time."""
    common = {"job_name": "tiny", "driver_args": ("recipe.toml",)}
    found, given = (
        [line for line in render_sbatch(a_job(**common, **paths)).splitlines() if line[:1] != "#"]
        for paths in ({}, {"home": "/h", "python": "/p", "run_folder": "/r"})
    )
    assert given[0] == "home=/h" and found[1:5] == given[1:5]
    words = '--script="$0" --name=tiny', "--name=tiny --run-folder=/r --python=/p"
    assert found[5].replace(*words) == given[5]


def check_bash(script: Path) -> None:
    """At most 30 lines without functions; bash and shellcheck accept them."""
    lines = script.read_text().splitlines()
    assert len(lines) <= 30 and not [line for line in lines if re.match(r"\w+\(\)", line)]
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; on Debian: apt-get install shellcheck")
    # Quoted variables stay literal: slurm.batch expands them.
    checked = subprocess.run(
        ["shellcheck", "--exclude=SC2016", script], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
