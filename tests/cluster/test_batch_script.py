"""The batch script on real Slurm: every way in which a job ends or is requeued.

The agents are stubs that only write verdicts (tests/fakes/cluster_home); the driver's first
argument selects their behaviour. Jobs that nothing disturbs are submitted at the same time.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.ledger import Ledger
from slurm.render import render_sbatch
from slurm.states import JobState
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_host import wait_until
from tests.settings import a_job

STUB_HOME = Path(__file__).parents[1] / "fakes/cluster_home"
DEADLINE_S = 240.0  # of all scenarios, which wait for each other's nodes
AGAIN_S = 3  # longer than Slurm takes to requeue a job that has ended
every_slurm = pytest.mark.every_slurm
INNER = (("gres", "gpu"), ("gpus-per-node", "gpu"), ("gres", "task"))
"""How a job requests its GPUs, and what the outer job of ``salloc`` requests CPUs for."""
EXIT_CODES = {"config": 78, "failed": 1, "crash": 3}
"""Of a job that is not requeued, by the behaviour of its agents."""
HOSTILE = "a'; touch x $(touch y) #"
HOSTILE_HOME = "code '\"$(touch z)"
BLOCKER = "#!/bin/bash\n#SBATCH --partition=high --exclusive --nodes={nodes} --output=/dev/null\n"


@dataclass(frozen=True)
class Run:
    """A submitted job and its run folder."""

    lab: Lab
    job: str
    folder: Path

    def attempt(self, number: int) -> Path:
        return self.folder / "attempts" / str(number)

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("slurm-*.out"))

    def until_agents_run(self, num_nodes: int, attempt: int = 0) -> None:
        def ready() -> bool:
            return len(list(self.attempt(attempt).glob("argv-*.json"))) == num_nodes

        until(ready, self.lab, f"{num_nodes} agents of attempt {attempt}\n{self.log}")

    def until_over(self, *states: JobState, exit_code: int | None = 0) -> None:
        until(
            lambda: job_info(self.lab, self.job).state.is_over,
            self.lab,
            f"job {self.job} is over",
            deadline_s=DEADLINE_S,
        )
        info = job_info(self.lab, self.job)
        assert info.state in states, self.log
        assert exit_code in (None, info.exit_code), (info.exit_code, self.log)


def start(lab: Lab, name: str, behaviour: str, **values: Any) -> Run:
    """Submit a job of two nodes whose code is the stub, with the run folder ``name``."""
    folder = lab.shared / name
    options, inside = values.pop("options", ()), values.pop("inside", ())
    folder.mkdir()
    places = {
        "home": str(STUB_HOME),
        "python": sys.executable,
        "run_folder": str(folder),
        "time": "10",
    }
    output = f"{folder}/slurm-%j.out"
    spec = a_job(**{"nodes": 2, "driver_args": (behaviour,), "output": output, **places, **values})
    return Run(lab, sbatch(lab, "job.sbatch", render_sbatch(spec), *options, inside=inside), folder)


@pytest.fixture
def submit(request: pytest.FixtureRequest) -> Callable[..., Run]:
    """``submit(lab, behaviour, **spec)`` starts a job whose code is the stub."""

    def submit(lab: Lab, behaviour: str, **values: Any) -> Run:
        return start(lab, values.pop("folder", request.node.name), behaviour, **values)

    return submit


def scenarios(lab: Lab) -> dict[str, dict[str, Any]]:
    """Jobs that nothing disturbs, by the names of their run folders, for every Slurm."""
    home = lab.shared / HOSTILE_HOME
    shutil.copytree(STUB_HOME, home)
    hostile = {"home": str(home), "driver_args": ("done", "$(touch x)", "'; touch y")}
    outer = ["salloc", "--ntasks=1", "--mem-per-cpu=100", "--gpus=1", "--gpus-per-task=1"]
    inner = {
        f"inner-{gpu_request}-{per}": {
            "gpu_request": gpu_request,
            "inside": [*outer, "--time=5", f"--cpus-per-{per}=2"],
        }
        for gpu_request, per in INNER
    }
    return {
        **inner,  # first, because salloc waits for a node
        "finished": {"agent_args": ("--socket-ifname", "eth0")},
        **{name: {"driver_args": (name,), "max_failures": 0} for name in EXIT_CODES},
        HOSTILE: hostile,
    }


def scenarios_of_one_slurm(lab: Lab) -> dict[str, dict[str, Any]]:
    """Those that only the Slurm of this machine runs."""
    empty, missing = lab.shared / "empty", lab.shared / "missing"
    empty.mkdir()
    variables = "--export=ALL,SQUEUE_STATES=PENDING,SQUEUE_FORMAT=%j"
    return {
        "squeue-variables": {"driver_args": ("requeue-once",), "options": [variables]},
        "unexported": {"options": ["--export=NONE"]},
        "without-home": {"home": str(empty)},
        "without-python": {"python": str(missing)},
    }


@pytest.fixture(scope="module")
def runs(lab: Lab, slurm_release: str | None) -> dict[str, Run]:
    """All scenarios, submitted at the same time."""
    jobs = scenarios(lab) | ({} if slurm_release else scenarios_of_one_slurm(lab))
    return {name: start(lab, name, "done", **values) for name, values in jobs.items()}


@pytest.fixture(scope="module")
def array(lab: Lab) -> dict[int, Run]:
    """Both tasks of an array, by their number."""
    home = lab.shared / "sweep"
    shutil.copytree(STUB_HOME, home)
    (home / ".venv/bin").mkdir(parents=True)
    (home / ".venv/bin/python").symlink_to(sys.executable)
    shares = {"exclusive": False, "num_gpus_per_node": 1, "time": "10"}
    script = render_sbatch(a_job(job_name="sweep", driver_args=("requeue-once",), **shares))
    (home / "sweep.sbatch").write_text(script)
    words = ["sbatch", "--parsable", "--array=0-1", "sweep.sbatch"]
    job = lab.run("ctl", words, cwd=home).stdout.strip()
    return {task: Run(lab, f"{job}_{task}", home / f"runs/sweep-{job}_{task}") for task in (0, 1)}


def test_each_task_of_an_array_has_its_own_run_folder_and_requeue(
    array: dict[int, Run], runs: dict[str, Run]
) -> None:
    """Both tasks are requeued once. The last one has the array's number, which means both."""
    for run in array.values():
        run.until_over(JobState.COMPLETED)
        assert (run.attempt(1) / "verdict").read_text() == "done\n"
        assert not (run.folder / "attempts/2").exists()
        ended = Ledger(run.folder / "ledger.jsonl").read()
        assert [entry["answer"] for entry in ended if entry["event"] == "verdict"] == ["again", 0]
        assert {entry["job_id"] for entry in ended if "job_id" in entry} == {run.job}


def test_squeue_variables_of_the_user_do_not_prevent_a_requeue(runs: dict[str, Run]) -> None:
    run = runs["squeue-variables"]
    run.until_over(JobState.COMPLETED)
    assert job_info(run.lab, run.job).num_restarts == 1


def test_a_job_without_the_environment_of_its_user_passes_its_own_to_the_agents(
    runs: dict[str, Run],
) -> None:
    """As at sites that set SBATCH_EXPORT=NONE, with which srun exports nothing of the script's."""
    run = runs["unexported"]
    run.until_over(JobState.COMPLETED)
    called = list(run.attempt(0).glob("argv-*.json"))
    assert len(called) == 2
    for path in called:
        environment = json.loads(path.read_text())["environment"]
        assert environment["PYTHONPATH"] == environment["RLPOST_HOME"] == str(STUB_HOME)


def test_a_script_submitted_from_another_folder_names_the_remedy_and_leaves_nothing(
    lab: Lab, runs: dict[str, Run]
) -> None:
    homeless, without_python = runs["without-home"], runs["without-python"]
    without = {
        f"no rlpost in {lab.shared}/empty; sbatch there": homeless,
        f"no {lab.shared}/missing on n0": without_python,
    }
    for message, run in without.items():
        run.until_over(JobState.FAILED, exit_code=78)
        assert message in run.log.splitlines()[-1]
        assert not (run.folder / "attempts").exists()
    assert re.search("on n0[1-4]; make install there", without_python.log.splitlines()[-1])


def test_plain_sbatch_in_the_projects_folder_finds_code_interpreter_and_run_folder(
    lab: Lab,
) -> None:
    """All follow from the folder in which sbatch was called; the login node runs no Python."""
    home = lab.shared / "project"
    shutil.copytree(STUB_HOME, home)
    (home / ".venv/bin").mkdir(parents=True)
    (home / ".venv/bin/python").symlink_to(sys.executable)
    script = render_sbatch(
        a_job(job_name="tiny", time="10", driver_args=("recipe.toml",), max_failures=0)
    )
    (home / "tiny.sbatch").write_text(script)
    submitted = lab.run(
        "ctl", ["sbatch", "--parsable", "--nodes=2", "tiny.sbatch", "--lr", "1"], cwd=home
    )
    run = Run(lab, submitted.stdout.strip(), home / f"runs/tiny-{submitted.stdout.strip()}")
    # the stub writes its first argument, recipe.toml, as the verdict
    run.until_over(JobState.FAILED, exit_code=1)
    facts = json.loads(next(run.attempt(0).glob("argv-*.json")).read_text())
    added = ["--cluster-from-stdin", "--run-folder", str(run.folder)]
    assert facts["driver"][-6:] == ["recipe.toml", *added, "--lr", "1"]
    assert facts["cwd"] == str(home)
    assert "verdict: recipe.toml" in (home / f"slurm-{run.job}.out").read_text()
    assert run.folder.stat().st_mode & 0o777 == 0o700


@every_slurm
def test_a_finished_run_completes_and_its_agents_got_their_arguments(
    runs: dict[str, Run],
) -> None:
    """One agent on each node, in the code's folder; only the owner can read the secret."""
    run = runs["finished"]
    run.until_over(JobState.COMPLETED)
    attempt = run.attempt(0)
    called = sorted(attempt.glob("argv-*.json"))
    assert len(called) == 2
    for path in called:
        facts = json.loads(path.read_text())
        assert facts["agent"] == [
            "--attempt-dir",
            str(attempt),
            "--num-gpus",
            "8",
            "--socket-ifname",
            "eth0",
        ]
        driver = [sys.executable, "-u", "-m", "rlpost.train", "done"]
        assert facts["driver"] == [*driver, "--cluster-from-stdin", "--run-folder", str(run.folder)]
        assert (facts["cwd"], facts["environment"]["PYTHONPATH"]) == (
            str(STUB_HOME),
            str(STUB_HOME),
        )
    assert (attempt / "secret").stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex((attempt / "secret").read_text())) == 32
    assert (run.folder / "attempts/latest").readlink() == Path("0")


@every_slurm
@pytest.mark.parametrize(("gpu_request", "per"), INNER)
def test_a_run_submitted_from_inside_another_job_has_the_resources_that_it_asked_for(
    runs: dict[str, Run], gpu_request: str, per: str
) -> None:
    """The environment of the outer job holds its own requests, which srun reads as options."""
    run = runs[f"inner-{gpu_request}-{per}"]
    run.until_over(JobState.COMPLETED)
    # the latest: Slurm requeues a job that a busy node did not start
    called = list((run.folder / "attempts/latest").glob("argv-*.json"))
    assert len(called) == 2, run.log
    for path in called:
        variables = json.loads(path.read_text())["environment"]
        assert variables["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7", run.log
        assert variables["SLURM_CPUS_PER_TASK"] is None


@every_slurm
@pytest.mark.parametrize("name", EXIT_CODES)
def test_what_would_fail_again_is_not_requeued(runs: dict[str, Run], name: str) -> None:
    """A wrong setting, a failure without a budget, and agents that die without a verdict: each has
    its own exit code.
    """
    run = runs[name]
    run.until_over(JobState.FAILED, exit_code=EXIT_CODES[name])
    assert "not requeued" in run.log
    assert job_info(run.lab, run.job).num_restarts == 0


@every_slurm
def test_shell_syntax_in_paths_and_arguments_is_not_executed(
    lab: Lab, runs: dict[str, Run]
) -> None:
    """Quotes, blanks and dollar signs reach the agent unchanged."""
    run, home = runs[HOSTILE], lab.shared / HOSTILE_HOME
    run.until_over(JobState.COMPLETED)
    (facts, _) = (json.loads(path.read_text()) for path in run.attempt(0).glob("argv-*.json"))
    assert facts["cwd"] == str(home)
    added = ["--cluster-from-stdin", "--run-folder", str(run.folder)]
    assert facts["driver"][-6:] == ["done", "$(touch x)", "'; touch y", *added]
    assert len(list(run.attempt(0).glob("agent-n*.log"))) == 2
    assert "verdict: done" in run.log
    places = (lab.shared, home, run.folder, run.attempt(0))
    assert not [place for place in places for letter in "xyz" if (place / letter).exists()]


@dataclass(frozen=True)
class Interrupted:
    """Two runs that are stopped at the same time.

    Attributes:
        signalled: its batch shell got USR2.
        preempted: on a lab without user signal, by the job ``urgent``.
    """

    signalled: Run
    preempted: Run
    urgent: str


@pytest.fixture(scope="module")
def interrupted(lab: Lab, lab_without_user_signal: Lab) -> Interrupted:
    signalled = start(lab, "signalled", "wait-once")
    preempted = start(lab_without_user_signal, "preempted", "wait-once", partition="low")
    for run in (signalled, preempted):
        run.until_agents_run(2)
    lab.run("ctl", ["scancel", "--batch", "--signal=USR2", signalled.job])
    urgent = sbatch(preempted.lab, "high.sbatch", BLOCKER.format(nodes=2))
    return Interrupted(signalled, preempted, urgent)


@every_slurm
def test_usr2_to_the_batch_shell_stops_the_run_and_requeues_it(interrupted: Interrupted) -> None:
    """As before the time limit. The tasks get no signal; the second attempt has another folder and
    another secret.
    """
    run = interrupted.signalled
    run.until_over(JobState.COMPLETED)
    assert "USR2" in json.loads((run.attempt(0) / "STOP").read_text())["reason"]
    assert not list(run.attempt(0).glob("signals-*"))
    assert job_info(run.lab, run.job).num_restarts == 1
    assert (run.attempt(1) / "verdict").read_text() == "done\n"
    assert not (run.attempt(1) / "STOP").exists()
    assert (run.attempt(1) / "secret").read_text() != (run.attempt(0) / "secret").read_text()
    assert (run.folder / "attempts/latest").readlink() == Path("1")


@every_slurm
def test_preemption_without_user_signal_requeues_the_run_too(interrupted: Interrupted) -> None:
    """TERM goes to the tasks alone: the agents request the stop, and the batch script requeues."""
    run = interrupted.preempted
    run.until_over(JobState.COMPLETED, JobState.PREEMPTED)
    assert job_info(run.lab, interrupted.urgent).state is JobState.COMPLETED
    assert "agent on" in json.loads((run.attempt(0) / "STOP").read_text())["reason"]
    assert "TERM: cancelled" not in run.log
    assert (run.attempt(1) / "verdict").read_text() == "done\n"


@every_slurm
def test_preemption_with_user_signal_requeues_a_run_once_and_its_end_is_the_end_of_the_job(
    lab: Lab, submit: Callable[..., Run]
) -> None:
    """Slurm 24.05 to 25.11 mark the job as preempted for good, requeue it whenever it ends while it
    may be requeued, and record PREEMPTED when it may not.
    """
    run = submit(lab, "wait-once", partition="low", nodes=4)
    run.until_agents_run(4)
    high = sbatch(lab, "high.sbatch", BLOCKER.format(nodes=4))
    run.until_over(JobState.COMPLETED, JobState.PREEMPTED)

    def runs_again() -> bool:
        info = job_info(lab, run.job)
        return not info.state.is_over or info.num_restarts > 1 or run.attempt(2).exists()

    # a requeued job is PENDING at once, so this takes its time only where none was requeued
    assert not wait_until(runs_again, deadline_s=AGAIN_S), job_info(lab, run.job)
    assert job_info(lab, high).state is JobState.COMPLETED
    assert "batch script" in json.loads((run.attempt(0) / "STOP").read_text())["reason"]
    assert not list(run.attempt(0).glob("signals-*"))
    assert (run.attempt(1) / "verdict").read_text() == "done\n"


@every_slurm
def test_a_cancelled_run_is_never_requeued(lab: Lab, submit: Callable[..., Run]) -> None:
    """Even if its agents write the verdict requeue, or if it was being stopped already."""
    runs = [submit(lab, "wait", folder=name) for name in ("cancelled", "stopped-before")]
    for run in runs:
        run.until_agents_run(2)
    cancelled, stopped = (run.job for run in runs)
    words = f"scancel {cancelled}; scancel --batch --signal=USR2 {stopped}; scancel {stopped}"
    lab.run("ctl", ["sh", "-c", words])
    for run in runs:
        run.until_over(JobState.CANCELLED, exit_code=None)
    jobs = f"{cancelled},{stopped}"
    until(
        lambda: lab.run("ctl", ["squeue", "-h", "-j", jobs], check=False).stdout == "",
        lab,
        "the jobs have left the queue",
    )
    for run in runs:
        assert "requeue:" not in run.log
        attempts = [path for path in (run.folder / "attempts").iterdir() if not path.is_symlink()]
        assert [path.name for path in attempts] == ["0"]
        assert job_info(lab, run.job).num_restarts == 0
