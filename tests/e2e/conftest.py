"""Fixtures of whole runs: the tiny model and its prompts, and a run that nobody disturbed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fixtures import slurm_available
from tests.cluster.lab import Lab
from tests.cluster.lab_config import LabOptions
from tests.e2e.runs import RECIPE, ROOT, SETTINGS, Run, until_over

__all__ = ["slurm_available"]


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder that the tiny recipe names; made once, kept between test runs."""
    folder = ROOT / "assets/tiny"
    subprocess.run([sys.executable, "tools/make_tiny_model.py", "--out", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the undisturbed run records its generations; visible in every lab."""
    folder = Path("/var/tmp") / f"rlpost-recordings-{tmp_path_factory.getbasetemp().name}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.fixture(scope="session")
def signalling_lab(slurm_available: None) -> Iterator[Lab]:
    """Two nodes; a preempted job gets its ``--signal`` at once."""
    with Lab(2, name="e2esignal", options=LabOptions(grace_time_s=120)) as lab:
        yield lab


@pytest.fixture(scope="session")
def undisturbed(signalling_lab: Lab, assets: Path, recordings: Path) -> Run:
    """A run on two nodes from the first step to the last, submitted by rlpost.submit."""
    run = Run(signalling_lab, signalling_lab.shared / "undisturbed")
    record = ["--save-debug-rollout-data", str(recordings / "{rollout_id}.jsonl")]
    command = [sys.executable, "-m", "rlpost.submit", RECIPE, *SETTINGS, "--nodes", "2", *record]
    done = signalling_lab.run("ctl", [*command, "--run-folder", str(run.folder)], cwd=ROOT)
    run.job = done.stdout.split()[1]
    until_over(run)
    return run
