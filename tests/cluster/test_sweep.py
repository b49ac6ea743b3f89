"""``rlpost sweep`` on real Slurm. The agents of its runs start nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.run_folder import RunFolder
from tests.cluster.jobs import job_info, until
from tests.cluster.lab import Lab
from tests.cluster.test_verbs import REPOSITORY, STUB_HOME, rlpost
from tests.unit.cli.projects import make_project

GRID = ("--grid", "lr=1e-6,2e-6")

# rlpost sweep; its snapshot of the code is that of the stand-in agent.
SWEEP = """\
import sys; from pathlib import Path
import rlpost.cli.submit as verb, rlpost.extensions.sweep.sweep_verb as sweep
from rlpost.cli.entry import run_command
spec, verb.PROJECT = verb.job_spec, Path(sys.argv[1])
verb.job_spec = lambda config, **rest: spec(config, driver_args=(sys.argv[2],))
sys.exit(run_command(sweep.main, sys.argv[3:]))
"""


def start_sweep(lab: Lab, project: Path, behaviour: str, *flags: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", SWEEP, str(STUB_HOME), behaviour, "recipe.toml", *GRID, *flags]
    pipe = subprocess.PIPE
    env = {"PYTHONPATH": str(REPOSITORY)}
    return lab.popen("ctl", argv, cwd=project, env=env, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a sweep that must succeed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def states(lab: Lab, runs_dir: Path) -> list[str]:
    """The states that ``rlpost list --json`` prints, by the names of the runs."""
    argv = [sys.executable, "-m", "rlpost", "list", "--runs-dir", str(runs_dir), "--json"]
    done = lab.run("ctl", argv, env={"PYTHONPATH": str(REPOSITORY)}, check=False)
    return [run["state"] for run in sorted(json.loads(done.stdout), key=lambda run: run["name"])]


@pytest.fixture(scope="module")
def project(lab: Lab) -> Path:
    return make_project(lab.shared / "swept")


def test_each_point_is_a_job_with_its_settings_that_is_requeued_and_cancelled_alone(
    lab: Lab, project: Path
) -> None:
    """Each run is a separate job with a separate output file, not a task of a job array."""
    runs_dir = lab.shared / "sweeps"
    flags = ("--name", "s", "--runs-dir", str(runs_dir))
    output = finish(start_sweep(lab, project, "wait", *flags))
    assert sorted(path.name for path in runs_dir.iterdir()) == ["s-p0", "s-p1"]
    runs = [RunFolder(runs_dir / f"s-p{number}") for number in range(2)]
    jobs = [run.ledger.read()[1]["job_id"] for run in runs]
    assert len(set(jobs)) == 2
    assert jobs == re.findall(r"^submitted (\d+)$", output, re.MULTILINE)
    rates = [json.loads(run.run_json.read_text())["optimizer"]["lr"] for run in runs]
    assert rates == [1e-6, 2e-6]
    described = [
        lab.run("ctl", ["scontrol", "--oneliner", "show", "job", job]).stdout for job in jobs
    ]
    assert not [text for text in described if "ArrayTaskId" in text]
    assert len({re.search(r"StdOut=(\S+)", text)[1] for text in described}) == 2
    until(lambda: all(list(run.attempts.glob("0/argv-*.json")) for run in runs), lab, "both are up")
    rlpost(lab, "requeue", str(runs[0].root))
    until(lambda: bool(list(runs[0].attempts.glob("1/argv-*.json"))), lab, "the second attempt")
    assert [job_info(lab, job).num_restarts for job in jobs] == [1, 0]
    rlpost(lab, "cancel", str(runs[0].root))
    until(lambda: job_info(lab, jobs[0]).state.is_over, lab, "the first run is over")
    assert states(lab, runs_dir) == ["CANCELLED", "RUNNING"]
    rlpost(lab, "cancel", str(runs[1].root))
    until(lambda: job_info(lab, jobs[1]).state.is_over, lab, "the second run is over")
