"""The profiles of jobs/clusters: each is loaded as settings and rendered as a whole batch script."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.cli.job import job_spec
from rlpost.config.load import load
from slurm.render import render_sbatch
from slurm.spec import JobSpec

PROFILES = sorted((Path(__file__).parents[2] / "jobs/clusters").glob("*.toml"))
RUN = "/shared/runs/rl"


def spec(profile: Path) -> JobSpec:
    """The job of a profile for a run in a folder; as ``executor.completed`` makes it."""
    values = job_spec(load([profile], {"cluster": {"nodes": 1}}, base=Path("/shared")).config)
    places = {"home": f"{RUN}/code", "run_folder": RUN, "output": f"{RUN}/slurm-%j.out"}
    return replace(values.with_python("/shared/venv/bin/python"), **places)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_makes_the_script_that_was_reviewed(
    profile: Path, golden: Callable[[str, str], None]
) -> None:
    """The whole text equals the golden file, fits on a page and passes bash."""
    script = render_sbatch(spec(profile))
    golden(f"profiles/{profile.stem}.sbatch", script)
    assert len(script.splitlines()) <= 80
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_there_is_a_profile_for_each_kind_of_site() -> None:
    """Every form of GPU request, every container backend, every kind of requeue."""
    specs = [spec(profile) for profile in PROFILES]
    assert {one.gpu_request for one in specs} == {"gres", "gpus-per-node", "none"}
    assert {one.container.backend if one.container else None for one in specs} == {
        "auto",
        "pyxis",
        "enroot",
        None,
    }
    assert {one.requeue for one in specs} == {"requeue", "chain", "never"}
