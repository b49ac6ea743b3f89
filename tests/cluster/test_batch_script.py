"""The batch script on real Slurm: every way in which a job ends or is requeued.

The agents are stubs that only write verdicts (tests/fakes/cluster_home); the driver's first
argument selects their behaviour.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.ledger import Ledger
from slurm.render import render_sbatch
from slurm.states import JobState
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_host import wait_until
from tests.settings import a_job

STUB_HOME = Path(__file__).parents[1] / "fakes/cluster_home"
AGAIN_S = 3  # longer than Slurm takes to requeue a job that has ended
every_slurm = pytest.mark.every_slurm
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
            lambda: job_info(self.lab, self.job).state.is_over, self.lab, f"job {self.job} is over"
        )
        info = job_info(self.lab, self.job)
        assert info.state in states, self.log
        assert exit_code in (None, info.exit_code), (info.exit_code, self.log)


@pytest.fixture
def submit(request: pytest.FixtureRequest) -> Callable[..., Run]:
    """``submit(lab, behaviour, **spec)`` starts a job whose code is the stub."""

    def start(lab: Lab, behaviour: str, **values: object) -> Run:
        folder = lab.shared / str(values.pop("folder", request.node.name))
        options, inside = values.pop("options", ()), values.pop("inside", ())
        folder.mkdir()
        places = {
            "home": str(STUB_HOME),
            "python": sys.executable,
            "run_folder": str(folder),
            "time": "10",
        }
        output = f"{folder}/slurm-%j.out"
        spec = a_job(
            **{"nodes": 2, "driver_args": (behaviour,), "output": output, **places, **values}
        )
        return Run(
            lab, sbatch(lab, "job.sbatch", render_sbatch(spec), *options, inside=inside), folder
        )

    return start


@every_slurm
def test_a_finished_run_completes_and_its_agents_got_their_arguments(
    lab: Lab, submit: Callable[..., Run]
) -> None:
    """One agent on each node, in the code's folder; only the owner can read the secret."""
    run = submit(lab, "done", agent_args=("--socket-ifname", "eth0"))
    run.until_over(JobState.COMPLETED)
    attempt = run.attempt(0)
    for host in ("n01", "n02"):
        facts = json.loads((attempt / f"argv-{host}.json").read_text())
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
@pytest.mark.parametrize(
    ("gpu_request", "per"), [("gres", "gpu"), ("gpus-per-node", "gpu"), ("gres", "task")]
)
def test_a_run_submitted_from_inside_another_job_has_the_resources_that_it_asked_for(
    lab: Lab, submit: Callable[..., Run], gpu_request: str, per: str
) -> None:
    """The environment of the outer job holds its own requests, which srun reads as options."""
    asked = [
        "--ntasks=1",
        "--mem-per-cpu=100",
        "--gpus=1",
        "--gpus-per-task=1",
        f"--cpus-per-{per}=2",
        "--time=5",
    ]
    run = submit(
        lab,
        "done",
        folder=f"inner-{gpu_request}-{per}",
        gpu_request=gpu_request,
        inside=["salloc", *asked],
    )
    run.until_over(JobState.COMPLETED)
    attempt = run.folder / "attempts/latest"  # Slurm starts a job again that a busy node did not
    called = list(attempt.glob("argv-*.json"))  # not on the node that the outer job still holds
    assert len(called) == 2, run.log
    for path in called:
        facts = json.loads(path.read_text())
        assert facts["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7", run.log
        assert facts["environment"]["SLURM_CPUS_PER_TASK"] is None


def test_a_job_without_the_environment_of_its_user_passes_its_own_to_the_agents(
    lab: Lab, submit: Callable[..., Run]
) -> None:
    """As at sites that set SBATCH_EXPORT=NONE, with which srun exports nothing of the script's."""
    run = submit(lab, "done", options=["--export=NONE"])
    run.until_over(JobState.COMPLETED)
    facts = json.loads((run.attempt(0) / "argv-n02.json").read_text())
    assert (
        facts["environment"]["PYTHONPATH"] == facts["environment"]["RLPOST_HOME"] == str(STUB_HOME)
    )


def test_squeue_variables_of_the_user_do_not_prevent_a_requeue(
    lab: Lab, submit: Callable[..., Run]
) -> None:
    run = submit(
        lab, "requeue-once", options=["--export=ALL,SQUEUE_STATES=PENDING,SQUEUE_FORMAT=%j"]
    )
    run.until_over(JobState.COMPLETED)
    assert job_info(lab, run.job).num_restarts == 1


@pytest.mark.parametrize(
    ("missing", "message"),
    [("home", "no rlpost in {}; sbatch there"), ("python", "no {} on n01; make install there")],
)
def test_a_script_submitted_from_another_folder_names_the_remedy_and_leaves_nothing(
    lab: Lab, submit: Callable[..., Run], missing: str, message: str
) -> None:
    nowhere = lab.shared / f"no-{missing}"
    if missing == "home":
        nowhere.mkdir()
    run = submit(lab, "done", folder=f"run-without-{missing}", **{missing: str(nowhere)})
    run.until_over(JobState.FAILED, exit_code=78)
    assert message.format(nowhere) in run.log.splitlines()[-1]
    assert not (run.folder / "attempts").exists()


@every_slurm
@pytest.mark.parametrize(("behaviour", "code"), [("config", 78), ("failed", 1), ("crash", 3)])
def test_what_would_fail_again_is_not_requeued(
    lab: Lab, submit: Callable[..., Run], behaviour: str, code: int
) -> None:
    """A wrong setting, a failure without a budget, and agents that die without a verdict: each has
    its own exit code.
    """
    run = submit(lab, behaviour, folder=behaviour, max_failures=0)
    run.until_over(JobState.FAILED, exit_code=code)
    assert "not requeued" in run.log
    assert job_info(lab, run.job).num_restarts == 0


@every_slurm
def test_usr2_to_the_batch_shell_stops_the_run_and_requeues_it(
    lab: Lab, submit: Callable[..., Run]
) -> None:
    """As before the time limit. The tasks get no signal; the second attempt has another folder and
    another secret.
    """
    run = submit(lab, "wait-once")
    run.until_agents_run(2)
    lab.run("ctl", ["scancel", "--batch", "--signal=USR2", run.job])
    run.until_over(JobState.COMPLETED)
    assert "USR2" in json.loads((run.attempt(0) / "STOP").read_text())["reason"]
    assert not list(run.attempt(0).glob("signals-*"))
    assert job_info(lab, run.job).num_restarts == 1
    assert (run.attempt(1) / "verdict").read_text() == "done\n"
    assert not (run.attempt(1) / "STOP").exists()
    assert (run.attempt(1) / "secret").read_text() != (run.attempt(0) / "secret").read_text()
    assert (run.folder / "attempts/latest").readlink() == Path("1")


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
def test_preemption_without_user_signal_requeues_the_run_too(
    lab_without_user_signal: Lab, submit: Callable[..., Run]
) -> None:
    """TERM goes to the tasks alone: the agents request the stop, and the batch script requeues."""
    lab = lab_without_user_signal
    run = submit(lab, "wait-once", partition="low")
    run.until_agents_run(2)
    high = sbatch(lab, "high.sbatch", BLOCKER.format(nodes=2))
    run.until_over(JobState.COMPLETED, JobState.PREEMPTED)
    assert job_info(lab, high).state is JobState.COMPLETED
    assert "agent on" in json.loads((run.attempt(0) / "STOP").read_text())["reason"]
    assert "TERM: cancelled" not in run.log
    assert (run.attempt(1) / "verdict").read_text() == "done\n"


@every_slurm
@pytest.mark.parametrize("stopped_before", [False, True])
def test_a_cancelled_run_is_never_requeued(
    lab: Lab, submit: Callable[..., Run], stopped_before: bool
) -> None:
    """Even if its agents write the verdict requeue, or if it was being stopped already."""
    run = submit(lab, "wait", folder=f"cancel-{stopped_before}")
    run.until_agents_run(2)
    if stopped_before:
        lab.run("ctl", ["sh", "-c", f"scancel --batch --signal=USR2 {run.job}; scancel {run.job}"])
    else:
        lab.run("ctl", ["scancel", run.job])
    run.until_over(JobState.CANCELLED, exit_code=None)
    until(
        lambda: lab.run("ctl", ["squeue", "-h", "-j", run.job], check=False).stdout == "",
        lab,
        "the job has left the queue",
    )
    assert "requeue:" not in run.log
    assert [path.name for path in (run.folder / "attempts").iterdir() if not path.is_symlink()] == [
        "0"
    ]
    assert job_info(lab, run.job).num_restarts == 0


@every_slurm
def test_shell_syntax_in_paths_and_arguments_is_not_executed(
    lab: Lab, submit: Callable[..., Run]
) -> None:
    """Quotes, blanks and dollar signs reach the agent unchanged."""
    name = "a'; touch x $(touch y) #"
    home = lab.shared / "code '\"$(touch z)"
    shutil.copytree(STUB_HOME, home)
    run = submit(
        lab, "done", folder=name, home=str(home), driver_args=("done", "$(touch x)", "'; touch y")
    )
    run.until_over(JobState.COMPLETED)
    facts = json.loads((run.attempt(0) / "argv-n01.json").read_text())
    assert facts["cwd"] == str(home)
    added = ["--cluster-from-stdin", "--run-folder", str(run.folder)]
    assert facts["driver"][-6:] == ["done", "$(touch x)", "'; touch y", *added]
    assert sorted(path.name for path in run.attempt(0).glob("agent-*.log")) == [
        "agent-n01.log",
        "agent-n02.log",
    ]
    assert "verdict: done" in run.log
    places = (lab.shared, home, run.folder, run.attempt(0))
    assert not [place for place in places for letter in "xyz" if (place / letter).exists()]


def test_each_task_of_an_array_has_its_own_run_folder_and_requeue(lab: Lab) -> None:
    """Both tasks are requeued once. The last one has the array's number, which means both."""
    home = lab.shared / "sweep"
    shutil.copytree(STUB_HOME, home)
    (home / ".venv/bin").mkdir(parents=True)
    (home / ".venv/bin/python").symlink_to(sys.executable)
    shares = {"exclusive": False, "num_gpus_per_node": 1, "time": "10"}
    script = render_sbatch(a_job(job_name="sweep", driver_args=("requeue-once",), **shares))
    (home / "sweep.sbatch").write_text(script)
    words = ["sbatch", "--parsable", "--array=0-1", "sweep.sbatch"]
    array = lab.run("ctl", words, cwd=home).stdout.strip()
    for task in (0, 1):
        run = Run(lab, f"{array}_{task}", home / f"runs/sweep-{array}_{task}")
        run.until_over(JobState.COMPLETED)
        assert (run.attempt(1) / "verdict").read_text() == "done\n"
        assert not (run.folder / "attempts/2").exists()
        ended = Ledger(run.folder / "ledger.jsonl").read()
        assert [entry["answer"] for entry in ended if entry["event"] == "verdict"] == ["again", 0]
        assert {entry["job_id"] for entry in ended if "job_id" in entry} == {run.job}


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
    facts = json.loads((run.attempt(0) / "argv-n02.json").read_text())
    added = ["--cluster-from-stdin", "--run-folder", str(run.folder)]
    assert facts["driver"][-6:] == ["recipe.toml", *added, "--lr", "1"]
    assert facts["cwd"] == str(home)
    assert "verdict: recipe.toml" in (home / f"slurm-{run.job}.out").read_text()
    assert run.folder.stat().st_mode & 0o777 == 0o700
