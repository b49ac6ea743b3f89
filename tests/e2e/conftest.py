"""Fixtures of whole runs: the tiny model and its prompts, and a run that is not disturbed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fixtures import slurm_available
from tests.cluster.jobs import until
from tests.cluster.lab import Lab
from tests.cluster.lab_config import LabOptions
from tests.cluster.lab_host import why_no_cached_folder
from tests.e2e.runs import (
    HF_TOKEN,
    RECIPE,
    ROOT,
    RUN_DEADLINE_S,
    SETTINGS,
    WANDB_KEY,
    Run,
    until_over,
)

__all__ = ["slurm_available"]

NFS_CACHE_S = 30  # acdirmin: how long an NFS client trusts what it knows of a folder

# Searches command lines, environments and Ray's folder of a node. The words are given backwards,
# or the search would find its own command line. The first line counts the files of Ray.
SEARCH = """
import pathlib, sys
words = [word[::-1].encode() for word in sys.argv[1:]]
of_ray = [path for folder in pathlib.Path("/tmp").glob("r[0-9]*") for path in folder.rglob("*") if path.is_file()]
of_proc = [path for kind in ("cmdline", "environ") for path in pathlib.Path("/proc").glob("[0-9]*/" + kind)]
print("ray", len(of_ray))
for path in of_ray + of_proc:
    try:
        if any(word in path.read_bytes() for word in words):
            print(path)
    except OSError:
        pass
"""


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder that the tiny recipe names; made once and kept between test runs."""
    folder = ROOT / "assets/tiny"
    command = [sys.executable, "-m", "rlpost.extensions.fetching.tiny_model", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def recordings() -> Iterator[Path]:
    """The folder in which the undisturbed run records its generations; visible in every lab."""
    with tempfile.TemporaryDirectory(prefix="rlpost-recordings-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def lab(slurm_available: None) -> Iterator[Lab]:
    """Four nodes; at a preemption the steps get TERM, the batch shell gets no signal. The shared
    folder is cached as by NFS.
    """
    cache_s = 0 if why_no_cached_folder() else NFS_CACHE_S
    options = LabOptions(grace_time_s=120, send_user_signal=False, shared_cache_s=cache_s)
    with Lab(4, name="e2e", options=options) as lab:
        yield lab


@pytest.fixture(scope="session")
def undisturbed(lab: Lab, assets: Path, recordings: Path) -> Run:
    """A run on two nodes from the first step to the last, submitted by rlpost.submit with a user's
    keys.
    """
    run = Run(lab, lab.shared / "undisturbed")
    record = ["--save-debug-rollout-data", str(recordings / "{rollout_id}.jsonl")]
    command = [sys.executable, "-m", "rlpost.submit", RECIPE, *SETTINGS, "--nodes", "2", *record]
    command += ["--wandb-key", WANDB_KEY, "--run-folder", str(run.folder)]
    done = lab.run("ctl", command, cwd=ROOT, env={"HF_TOKEN": HF_TOKEN})
    run.job = done.stdout.split()[1]
    until(lambda: len(run.metrics) > 1, run.lab, "a step is trained", deadline_s=RUN_DEADLINE_S)
    search = [sys.executable, "-c", SEARCH, WANDB_KEY[::-1], HF_TOKEN[::-1]]
    run.searched = [
        line for node in ("n01", "n02") for line in lab.run(node, search).stdout.splitlines()
    ]
    until_over(run)
    return run
