"""The verbs of the command line on real Slurm. The agent starts nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.run_folder import RunFolder
from tests.cluster.jobs import job_info, until
from tests.cluster.lab import Lab
from tests.cluster.planted import documented, planted
from tests.unit.cli.projects import make_project

REPOSITORY = Path(__file__).parents[2]
STUB_HOME = Path(__file__).parents[1] / "fakes/cluster_home"
SECRET = "hf_ThisTextMayStandInOneFileOnly"

# rlpost submit, except that its snapshot of the code is that of the stand-in agent.
SUBMIT = """\
import sys; from pathlib import Path; import rlpost.cli.submit as verb
spec, verb.PROJECT = verb.job_spec, Path(sys.argv[1])
verb.job_spec = lambda config, **rest: spec(config, driver_args=(sys.argv[2],))
sys.exit(verb.main(sys.argv[3:]))
"""


def rlpost(lab: Lab, *words: str, fails_with: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a verb on the login node; return its output, or its error output if it must fail."""
    argv = [sys.executable, "-m", "rlpost", *words]
    done = lab.run("ctl", argv, env={"PYTHONPATH": str(REPOSITORY), **(env or {})}, check=False)
    assert done.returncode == fails_with, (done.returncode, done.stdout, done.stderr)
    return done.stderr if fails_with else done.stdout


def submit(
    lab: Lab,
    project: Path,
    name: str,
    behaviour: str,
    *flags: str,
    env: dict[str, str] | None = None,
) -> tuple[RunFolder, str]:
    """Submit a run with this behaviour of the agents; return its folder and job id.

    ``env``: further variables of the submitting shell.
    """
    root = lab.shared / "runs" / name
    argv = [
        sys.executable,
        "-c",
        SUBMIT,
        str(STUB_HOME),
        behaviour,
        "recipe.toml",
        "--run-folder",
        str(root),
        *flags,
    ]
    own = {"PYTHONPATH": str(REPOSITORY), "HF_TOKEN": SECRET}
    out = lab.run("ctl", argv, cwd=project, env={**(env or {}), **own}).stdout
    return RunFolder(root), re.match(r"submitted (\d+)\n", out)[1]


@pytest.fixture(scope="module")
def project(lab: Lab) -> Path:
    return make_project(lab.shared / "project")


@pytest.fixture(scope="module")
def running(lab: Lab, project: Path) -> Iterator[tuple[RunFolder, str]]:
    """A run of two nodes that waits until the module ends."""
    run, job = submit(lab, project, "running", "wait", "--nodes", "2")
    until(lambda: len(list(run.attempts.glob("0/argv-*.json"))) == 2, lab, "both agents run")
    yield run, job
    lab.run("ctl", ["scancel", job])


def status(lab: Lab, *words: str) -> dict:
    """The status of a run; its exit code agrees with the state."""
    argv = [sys.executable, "-m", "rlpost", "status", "--json", *words]
    done = lab.run("ctl", argv, env={"PYTHONPATH": str(REPOSITORY)}, check=False)
    found = json.loads(done.stdout)
    codes = {"CANCELLED": 1, "FAILED": 1, "UNKNOWN": 3}
    assert done.returncode == codes.get(found["state"], 0), (found["state"], done.stderr)
    return found


def test_a_run_is_given_by_folder_name_or_job_id_and_is_the_newest_by_default(
    lab: Lab, running
) -> None:
    run, job = running
    found = [status(lab, *word) for word in ([str(run.root)], ["running"], [job], [])]
    assert {(one["folder"], one["job_id"], one["state"]) for one in found} == {
        (str(run.root), job, "RUNNING")
    }
    assert (found[0]["nodelist"], found[0]["attempt"], found[0]["verdict"]) == (
        "n[01-02]",
        "0",
        None,
    )
    assert 0 < found[0]["time_left_s"] <= 20 * 60
    assert "running" in rlpost(lab, "status", "nosuchrun", fails_with=2)


def test_a_command_runs_beside_the_run_on_every_node_or_on_one(lab: Lab, running) -> None:
    """In the run's code folder, without the submitter's keys; the verb returns its exit code."""
    run, _ = running
    lines = rlpost(
        lab, "exec", "--run", "running", "sh", "-c", "echo $(hostname) $PWD"
    ).splitlines()
    assert sorted(lines) == [f"0: n01 {run.code}", f"1: n02 {run.code}"]
    env = {"HF_TOKEN": SECRET}
    one = rlpost(
        lab, "exec", "--run", "running", "--node", "n02", "--", "sh", "-c", "hostname; env", env=env
    )
    assert one.startswith("n02\n") and SECRET not in one
    rlpost(lab, "exec", "--run", "running", "--node", "n01", "false", fails_with=1)
    assert "n01, n02" in rlpost(
        lab, "exec", "--run", "running", "--node", "n04", "true", fails_with=2
    )


def test_attach_gives_a_shell_with_a_terminal_on_the_node(lab: Lab, running) -> None:
    verb = f"{sys.executable} -m rlpost attach --run running n02"
    shell = lab.popen(
        "ctl",
        ["script", "--quiet", "--return", "--command", verb, "/dev/null"],
        env={"PYTHONPATH": str(REPOSITORY), "TERM": "dumb"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = shell.communicate("tty; hostname; exit 7\n", timeout=60)
    assert shell.returncode == 7, out
    assert "/dev/pts/" in out and "n02" in out.split()


def test_tunnel_prints_the_ssh_command_through_the_login_node(lab: Lab, running) -> None:
    run, _ = running
    assert "--ray-dashboard" in rlpost(lab, "tunnel", "running", fails_with=2)
    (run.attempts / "0/ray-n01.log").write_text(
        "INFO -- view the dashboard at \nINFO --   127.0.0.1:23456\n"
    )
    command = rlpost(lab, "tunnel", "running", "--login", "login.site").splitlines()[0]
    assert command == "ssh -N -L 8265:127.0.0.1:23456 -J login.site n01"


def test_a_waiting_run_has_a_reason_and_the_list_of_runs_needs_one_query(
    lab: Lab, project: Path, running, tmp_path
) -> None:
    run, job = submit(lab, project, "waiting", "done", "--nodes", "4")
    until(lambda: job_info(lab, job).reason == "Resources", lab, "the job waits for resources")
    found = status(lab, "waiting")
    assert (found["state"], found["reason"]) == ("PENDING", "Resources")
    assert "PENDING" in rlpost(lab, "requeue", "waiting", fails_with=2)
    asked = tmp_path / "asked"
    for name in ("squeue", "scontrol", "sacct", "sinfo"):
        real = next(
            Path(folder) / name
            for folder in ("/usr/bin", "/usr/local/bin")
            if (Path(folder) / name).exists()
        )
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} >>{asked}\nexec {real} "$@"\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    listed = json.loads(rlpost(lab, "list", "--json", env={"PATH": path}))
    assert {one["name"]: one["state"] for one in listed}.items() >= {
        "running": "RUNNING",
        "waiting": "PENDING",
    }.items()
    assert asked.read_text() == "squeue\n"
    rlpost(lab, "cancel", "waiting")
    until(lambda: job_info(lab, job).state.is_over, lab, "the waiting run is cancelled")
    assert status(lab, "waiting")["state"] == "CANCELLED"
    assert [entry["event"] for entry in run.ledger.read()] == [
        "submitting",
        "submitted",
        "cancelled",
    ]
    assert job_info(lab, job).num_restarts == 0


def test_requeue_starts_another_attempt_and_the_log_is_followed_to_the_end(
    lab: Lab, project: Path
) -> None:
    """The first attempt stops with verdict requeue, the second is done; ``logs -f`` shows both and
    returns 0.
    """
    run, job = submit(lab, project, "again", "wait-once")
    until(lambda: bool(list(run.attempts.glob("0/argv-*.json"))), lab, "the first attempt runs")
    (run.attempts / "0/driver.log").write_text("hello from the first attempt\n")
    rlpost(lab, "requeue", "again")
    follow = [sys.executable, "-m", "rlpost", "logs", "-f", "again"]
    done = lab.run("ctl", follow, env={"PYTHONPATH": str(REPOSITORY)}, timeout_s=120)
    assert "hello from the first attempt" in done.stdout and "--- attempt 1" in done.stdout
    assert job_info(lab, job).num_restarts == 1
    assert json.loads((run.attempts / "1/verdict.json").read_text())["verdict"] == "done"
    assert rlpost(lab, "logs", "again", "--attempt", "0") == "hello from the first attempt\n"
    assert "0, 1" in rlpost(lab, "logs", "again", "--attempt", "5", fails_with=2)


def test_a_cancelled_run_is_not_requeued(lab: Lab, project: Path) -> None:
    """Neither are the tasks of its engine jobs, by the ledger alone: one runs, others wait."""
    run, job = submit(lab, project, "cancelled", "wait")
    until(lambda: bool(list(run.attempts.glob("0/argv-*.json"))), lab, "the run is up")
    engines = ["sbatch", "--parsable", "--array=0-2%1", "--requeue", "--wrap", "sleep 600"]
    array = lab.run("ctl", engines).stdout.strip()
    run.ledger.append("fleet", array=array, engines=3)
    rlpost(lab, "cancel", "cancelled")
    until(lambda: job_info(lab, job).state.is_over, lab, "the run is over")
    queued = ["squeue", "--noheader", f"--jobs={array}"]
    until(lambda: not lab.run("ctl", queued, check=False).stdout, lab, "its engine jobs end")
    info = job_info(lab, job)
    assert (str(info.state), info.num_restarts) == ("CANCELLED", 0)
    assert not (run.attempts / "1").exists()
    assert "nothing to cancel" in rlpost(lab, "cancel", "cancelled", fails_with=2)


def test_a_job_that_slurm_does_not_know_has_the_state_unknown(lab: Lab, running) -> None:
    run = RunFolder(lab.shared / "elsewhere" / "old-4711")
    run.new_attempt()
    found = status(lab, "--runs-dir", "elsewhere", "4711")
    assert (found["state"], found["job_id"], found["step"]) == ("UNKNOWN", "4711", 0)


def test_a_dry_submission_to_slurm_creates_no_job(lab: Lab, project: Path, running) -> None:
    argv = [sys.executable, "-m", "rlpost", "submit", "recipe.toml", "--test-only"]
    env = {"PYTHONPATH": str(REPOSITORY)}
    before = lab.run("ctl", ["squeue", "-h", "-t", "all"]).stdout
    assert "to start at" in lab.run("ctl", argv, cwd=project, env=env).stdout
    refused = lab.run("ctl", [*argv, "--partition", "nowhere"], cwd=project, env=env, check=False)
    assert refused.returncode == 2 and "invalid partition" in refused.stderr
    assert "remedy: choose --partition; sinfo: " in refused.stderr, refused.stderr
    assert len(lab.run("ctl", ["squeue", "-h", "-t", "all"]).stdout.splitlines()) == len(
        before.splitlines()
    )


def test_a_key_of_the_submitter_is_in_one_file_and_nowhere_else(lab: Lab, project: Path) -> None:
    """In all files of the lab: those of the run, and those that Slurm wrote about its job."""
    run, job = submit(lab, project, "secret", "done")
    until(lambda: (run.attempts / "0/verdict").exists(), lab, "the run is done")
    until(lambda: job_info(lab, job).state.is_over, lab, "the job is over")
    found = subprocess.run(
        ["grep", "-rlaF", SECRET, str(lab.base)], capture_output=True, text=True
    ).stdout.split()
    assert str(run.root / "secrets.env") in found
    assert {Path(path).name for path in found} == {"secrets.env"}
    assert (run.root / "secrets.env").stat().st_mode & 0o777 == 0o600
    assert (run.root / "secrets.env").read_text() == f"HF_TOKEN={SECRET}\n"


def _asked_for(lab: Lab, job: str) -> dict[str, str]:
    """What a job and the step of its agents got, without names, times and places."""
    text = lab.run("ctl", ["scontrol", "--oneliner", "show", "job", job]).stdout
    text += lab.run("ctl", ["scontrol", "--oneliner", "show", "step", f"{job}.0"]).stdout
    same = (
        *("TimeLimit", "NumNodes", "NumCPUs", "NumTasks", "CPUs/Task", "TRES", "TresPerNode"),
        *("Requeue", "Partition", "OverSubscribe", "Features", "Dependency", "Nodes", "CPUs"),
        *("Tasks", "Dist", "Contiguous", "Licenses", "Network", "MinMemoryNode", "StepTRES"),
    )
    found = re.findall(r"(?:^|\s)([\w/]+)=(\S*)", text)
    return {f"{name} {i}": value for i, (name, value) in enumerate(found) if name in same}


def _gpus(run: RunFolder) -> list[str]:
    facts = [json.loads(path.read_text()) for path in run.attempts.glob("0/argv-*.json")]
    return [fact["environment"]["CUDA_VISIBLE_DEVICES"] for fact in facts]


def test_no_variable_that_slurm_reads_changes_a_job_or_keeps_it_from_being_cancelled(
    lab: Lab, project: Path, running
) -> None:
    """As in a shell inside another job, or with a user's defaults for Slurm's commands."""
    plain, plain_job = running
    variables = planted()
    assert len(variables) > 100 or not documented()
    run, job = submit(lab, project, "planted", "wait", "--nodes", "2", env=variables)
    until(lambda: len(list(run.attempts.glob("0/argv-*.json"))) == 2, lab, "both agents run")
    assert _asked_for(lab, job) == _asked_for(lab, plain_job) != {}
    assert _gpus(run) == _gpus(plain) == ["0,1,2,3"] * 2
    rlpost(lab, "cancel", "planted", env=variables)
    until(lambda: job_info(lab, job).state.is_over, lab, "the run is cancelled")
    assert status(lab, "planted")["state"] == "CANCELLED"
