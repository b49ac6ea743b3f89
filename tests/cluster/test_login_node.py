"""Submission, queries and host lists of ``slurm/`` against the real commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from common.host_lists import expand
from common.run_folder import create_run_folder
from tests.cluster.jobs import until
from tests.cluster.lab import Lab
from tests.unit.common.test_host_lists import LISTS

REPOSITORY = Path(__file__).parents[2]
STUB_HOME = Path(__file__).parents[1] / "fakes/cluster_home"


def python(lab: Lab, program: str, *arguments: str) -> str:
    """Run a program on the login node."""
    return lab.run(
        "ctl", [sys.executable, "-c", program, *arguments], cwd=REPOSITORY
    ).stdout.strip()


@pytest.mark.parametrize("text", LISTS)
def test_host_lists_expand_as_slurm_expands_them(lab: Lab, text: str) -> None:
    assert (
        list(expand(text)) == lab.run("ctl", ["scontrol", "show", "hostnames", text]).stdout.split()
    )


SUBMIT = """\
import sys; from pathlib import Path
from slurm.executor import submit; from common.run_folder import RunFolder; from tests.settings import a_job
spec = a_job(nodes=2, time="10", driver_args=(sys.argv[2],))
print(submit(spec, RunFolder(Path(sys.argv[1])), home=Path(sys.argv[3]), where="slurm"))
"""
FOLLOW = """\
import sys, time; from slurm import client; from slurm.states import JobState
job, end = sys.argv[1], time.monotonic() + 30
def wait_for(condition):
    while not condition(info := client.job_info(job)):
        assert time.monotonic() < end, info
        time.sleep(0.1)
    return info
running = wait_for(lambda info: info.state is JobState.RUNNING)
client.cancel(job)
over = wait_for(lambda info: info.state.is_over)
print(running.nodelist, over.state, client.job_info("999999").state)
"""


def test_submitit_submits_our_script_and_the_job_can_be_followed_and_cancelled(lab: Lab) -> None:
    """The job runs the rendered script; the client sees it run, cancels it, and reports an unknown
    job as such.
    """
    run = create_run_folder(lab.shared / "submitted", "{}")
    job = python(lab, SUBMIT, str(run.root), "wait", str(STUB_HOME))
    assert python(lab, FOLLOW, job) == "n[01-02] CANCELLED UNKNOWN"
    script = next(run.submitit.glob("*_submission.sh")).read_text()
    assert script == run.script.read_text()
    assert [entry["job_id"] for entry in run.ledger.read() if entry["event"] == "submitted"] == [
        job
    ]


def test_a_submitted_run_finishes_in_its_folder(lab: Lab) -> None:
    run = create_run_folder(lab.shared / "finished", "{}")
    # Slurm before 23.02 fails a job whose log has no folder, later versions create it on the node
    log_folder = lab.shared / "logs/of-finished"
    program = SUBMIT.replace("nodes=2", f"nodes=2, output='{log_folder}/slurm-%j.out'")
    job = python(lab, program, str(run.root), "done", str(STUB_HOME))
    assert log_folder.is_dir()
    log = log_folder / f"slurm-{job}.out"
    until(lambda: log.exists() and "verdict: done" in log.read_text(), lab, "the run is done")
    assert json.loads((run.attempts / "0/verdict.json").read_text())["verdict"] == "done"


def test_the_spec_overrides_the_sbatch_variables_of_the_user(lab: Lab) -> None:
    run = create_run_folder(lab.shared / "given", "{}")
    set_for_sbatch = [
        "SBATCH_PARTITION=low",
        "SBATCH_TIMELIMIT=7",
        "SBATCH_NO_REQUEUE=1",
        "SBATCH_ACCOUNT=rl",
    ]
    program = SUBMIT.replace("nodes=2", "nodes=2, partition='batch'")
    words = [sys.executable, "-c", program, str(run.root), "done", str(STUB_HOME)]
    job = lab.run("ctl", ["env", *set_for_sbatch, *words], cwd=REPOSITORY).stdout.strip()
    shown = lab.run("ctl", ["scontrol", "--oneliner", "show", "job", job]).stdout
    for field in ("Partition=batch", "TimeLimit=00:10:00", "Requeue=1", "Account=rl"):
        assert f" {field} " in shown, shown


def test_the_error_of_sbatch_is_shown(lab: Lab) -> None:
    run = create_run_folder(lab.shared / "refused", "{}")
    program = SUBMIT.replace("nodes=2", "partition='nowhere'")
    refused = lab.run(
        "ctl",
        [sys.executable, "-c", program, str(run.root), "x", str(STUB_HOME)],
        cwd=REPOSITORY,
        check=False,
    )
    assert refused.returncode != 0
    assert "SubmitError" in refused.stderr and "invalid partition specified" in refused.stderr
