"""What follows an attempt, on real Slurm: budgets, the limit on attempts without progress, excluded
nodes, chained jobs.

All scenarios run at the same time, one GPU each, on shared nodes; each test checks one of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from common.ledger import Ledger
from slurm.render import render_sbatch
from slurm.states import JobInfo, JobState
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.settings import a_job

STUB_HOME = Path(__file__).parents[1] / "fakes/cluster_home"
HOSTILE = "a'; touch x $(touch y)"
DEADLINE_S = 240.0

SCENARIOS: dict[str, dict[str, Any]] = {
    "failures": {"driver_args": ("failed",), "max_failures": 1},
    "stalled": {"driver_args": ("requeue",), "max_stalled_attempts": 2},
    "preemptions": {
        "driver_args": ("commit-requeue",),
        "max_preemptions": 1,
        "max_stalled_attempts": 1,
    },
    "never": {"driver_args": ("requeue",), "requeue": "never"},
    "exclude": {"driver_args": ("exclude-once",), "exclude": ("n[03-04]",)},
    "chain": {"driver_args": ("requeue-once",), "requeue": "chain", "job_name": "chain-of-its-own"},
    "linger": {"driver_args": ("linger",), "nodes": 2, "teardown_s": 1},
    "prepared": {
        "driver_args": ("done",),
        "environment": (("MARK", HOSTILE),),
        "setup_commands": ('export SET_UP="yes it\'s" # not the end', "echo prepared"),
    },
    "unprepared": {
        "driver_args": ("done",),
        "nodes": 2,
        "setup_commands": ("echo password=S3CRET", "false", "touch reached"),
    },
    "no-package": {"driver_args": ("no-package",), "nodes": 2},
    "no-room": {"driver_args": ("exclude-once",), "nodes": 4},
    "forbidden": {"driver_args": ("requeue-once",)},
    "short": {"driver_args": ("done",)},
    "finished": {"driver_args": ("done",)},
}
OPTIONS = {"forbidden": ("--no-requeue",), "short": ("--time=2",)}
"""What a plugin of the site may change."""
MAY_NOT_UPDATE = """#!/bin/bash
[ "$1" != update ] || { echo "Access/permission denied" >&2; exit 1; }
PATH=${PATH#*:} exec scontrol "$@"
"""


@dataclass(frozen=True)
class Run:
    """A run: its first job and its folder."""

    lab: Lab
    first_job: str
    folder: Path

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return Ledger(self.folder / "ledger.jsonl").read()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.ledger if entry["event"] == kind]

    @property
    def attempts(self) -> list[str]:
        return sorted(
            path.name for path in (self.folder / "attempts").iterdir() if not path.is_symlink()
        )

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("slurm-*.out")))

    def over(self) -> JobInfo:
        """Wait until the last job of the run is over; return it."""
        until(
            lambda: self._last().state.is_over,
            self.lab,
            f"{self.folder.name} is over",
            deadline_s=DEADLINE_S,
        )
        return self._last()

    def _last(self) -> JobInfo:
        jobs = [path.stem.removeprefix("slurm-") for path in self.folder.glob("slurm-*.out")]
        return job_info(self.lab, max([self.first_job, *jobs], key=int))


@pytest.fixture(scope="module")
def runs(lab: Lab) -> Iterator[dict[str, Run]]:
    """All scenarios, submitted at the same time."""
    started = {}
    for name, values in SCENARIOS.items():
        folder = lab.shared / name
        folder.mkdir()
        spec = a_job(
            **{
                "num_gpus_per_node": 1,
                "exclusive": False,
                "time": "10",
                "home": str(STUB_HOME),
                "python": sys.executable,
                "run_folder": str(folder),
                "output": f"{folder}/slurm-%j.out",
                **values,
            }
        )
        script = render_sbatch(spec)
        # as executor.submit does; the next job of a chain is made from it
        (folder / "job.sbatch").write_text(script)
        # May be set by a user; srun then reports one of several tasks that end alike.
        environment = {"SLURM_SRUN_REDUCE_TASK_EXIT_MSG": "1"}
        if name == "finished":
            (folder / "scontrol").write_text(MAY_NOT_UPDATE)
            (folder / "scontrol").chmod(0o755)
            environment["PATH"] = f"{folder}:{lab.environment()['PATH']}"
        options = OPTIONS.get(name, ())
        job = sbatch(lab, f"{name}.sbatch", script, *options, env=environment)
        started[name] = Run(lab, job, folder)
    yield started


def test_failures_are_requeued_until_their_budget_is_spent(runs: dict[str, Run]) -> None:
    """One failure allowed: two attempts, then the exit code of the failure; the ledger records each
    verdict and its cause.
    """
    run = runs["failures"]
    info = run.over()
    assert (info.state, info.exit_code, info.num_restarts) == (JobState.FAILED, 1, 1), run.log
    assert [(e["attempt"], e["verdict"], e["answer"]) for e in run.events("verdict")] == [
        (0, "failed", "again"),
        (1, "failed", 1),
    ]
    assert "max_failures is 1" in run.events("verdict")[1]["reason"]
    assert run.events("verdict")[0]["cause"] == "told to"
    assert [(e["attempt"], e["job_id"]) for e in run.events("attempt")] == [
        (0, run.first_job),
        (1, run.first_job),
    ]


def test_attempts_that_commit_nothing_new_end_the_run(runs: dict[str, Run]) -> None:
    run = runs["stalled"]
    info = run.over()
    assert (info.state, info.exit_code, info.num_restarts) == (JobState.FAILED, 75, 1), run.log
    assert "2 consecutive attempts" in run.events("verdict")[-1]["reason"]
    assert "nothing is saved yet: it starts from the beginning" in run.log


def test_preemptions_have_a_separate_budget(runs: dict[str, Run]) -> None:
    """Attempts that make progress are limited by this budget alone."""
    run = runs["preemptions"]
    info = run.over()
    assert (info.exit_code, info.num_restarts) == (75, 1), run.log
    assert "max_preemptions is 1" in run.events("verdict")[-1]["reason"]
    assert "it resumes from checkpoint 0" in run.log


def test_a_run_with_requeue_never_is_not_requeued(runs: dict[str, Run]) -> None:
    run = runs["never"]
    info = run.over()
    assert (info.exit_code, info.num_restarts, run.attempts) == (75, 0, ["0"]), run.log


def test_a_bad_node_is_excluded_from_the_next_attempt(runs: dict[str, Run]) -> None:
    """Together with the hosts excluded from the start: the new list replaces that of Slurm."""
    run = runs["exclude"]
    info = run.over()
    assert (info.state, info.num_restarts) == (JobState.COMPLETED, 1), run.log
    first, second = (entry["nodes"] for entry in run.events("attempt"))
    assert {first, second} == {"n01", "n02"}
    shown = run.lab.run("ctl", ["scontrol", "--oneliner", "show", "job", run.first_job]).stdout
    left_out = next(word for word in shown.split() if word.startswith("ExcNodeList=")).removeprefix(
        "ExcNodeList="
    )
    hosts = run.lab.run("ctl", ["scontrol", "show", "hostnames", left_out]).stdout.split()
    assert sorted(hosts) == sorted([first, "n03", "n04"])


@pytest.mark.parametrize("name", ["chain", "forbidden"])
def test_where_requeueing_is_forbidden_another_job_resumes_the_run(
    runs: dict[str, Run], name: str
) -> None:
    """The second job is the next attempt in the same folder, and starts when the first has ended.
    Also where the run asks for a requeue and the site turns it off.
    """
    run = runs[name]
    until(
        lambda: len(run.events("verdict")) == 2,
        run.lab,
        "the second of the chain",
        deadline_s=DEADLINE_S,
    )
    info = run.over()
    assert (info.state, info.num_restarts) == (JobState.COMPLETED, 0), run.log
    assert info.job_id != run.first_job
    assert [entry["job_id"] for entry in run.events("chained")] == [info.job_id]
    assert job_info(run.lab, run.first_job).state is JobState.COMPLETED
    assert run.attempts == ["0", "1"]
    shown = run.lab.run("ctl", ["scontrol", "--oneliner", "show", "job", run.first_job]).stdout
    assert " Requeue=0 " in shown and " Restarts=0 " in shown
    first, second = run.events("attempt")
    assert second["job_id"] == info.job_id and first["job_id"] == run.first_job
    assert second["time"] > run.events("verdict")[0]["time"]


def test_a_time_limit_that_was_cut_below_the_signals_lead_ends_the_job_with_both_numbers(
    runs: dict[str, Run],
) -> None:
    run = runs["short"]
    info = run.over()
    assert (info.exit_code, info.num_restarts) == (78, 0), run.log
    assert "the time limit of this job is 120 s, and --signal-lead-s 120" in run.log
    assert not (run.folder / "attempts").exists()


def test_a_finished_run_that_slurm_starts_again_ends_before_its_agents(
    runs: dict[str, Run],
) -> None:
    """Its user may not change the record of the job, so Slurm may restart it."""
    run = runs["finished"]
    assert run.over().state is JobState.COMPLETED
    run.lab.run("ctl", ["scontrol", "requeue", run.first_job])
    until(lambda: "not starting again" in run.log, run.lab, "the job starts again", deadline_s=180)
    info = run.over()
    assert (info.state, info.num_restarts) == (JobState.COMPLETED, 1), run.log
    assert run.attempts == ["0"] and len(run.events("verdict")) == 1


def test_an_srun_that_does_not_end_after_the_verdict_is_not_waited_for(
    runs: dict[str, Run],
) -> None:
    """As after the death of a node: one task does not end, and the head's verdict counts."""
    run = runs["linger"]
    info = run.over()
    assert (info.state, info.exit_code) == (JobState.COMPLETED, 0), run.log
    times = [datetime.fromisoformat(run.events(kind)[0]["time"]) for kind in ("attempt", "verdict")]
    assert (times[1] - times[0]).total_seconds() < 60  # the task would stay for 120 s


def test_setup_commands_run_before_the_agents(runs: dict[str, Run]) -> None:
    """The agent gets the run's variables unchanged, and those that setup commands export."""
    run = runs["prepared"]
    assert run.over().state is JobState.COMPLETED, run.log
    facts = json.loads(next((run.folder / "attempts/0").glob("argv-*.json")).read_text())
    assert facts["environment"]["MARK"] == HOSTILE
    assert facts["environment"]["SET_UP"] == "yes it's"
    assert "prepared" in next((run.folder / "attempts/0").glob("agent-*.log")).read_text()
    assert not [path for path in run.lab.shared.rglob("[xy]")] and not (STUB_HOME / "x").exists()


@pytest.mark.parametrize(
    ("name", "headline"),
    [
        ("unprepared", "the setup command `false` failed (Exited with exit code 1)"),
        (
            "no-package",
            "the Python package package_that_is_missing is missing (Exited with exit code 1)",
        ),
    ],
)
def test_what_fails_on_every_node_before_the_agents_ends_the_job_with_its_cause(
    runs: dict[str, Run], name: str, headline: str
) -> None:
    """In the first of four allowed attempts; ledger, batch log and attempt folder name the same
    cause.
    """
    run = runs[name]
    info = run.over()
    assert (info.state, info.exit_code, run.attempts) == (JobState.FAILED, 78, ["0"]), run.log
    (ended,) = run.events("verdict")
    (began,) = run.events("attempt")
    hosts = run.lab.run("ctl", ["scontrol", "show", "hostnames", began["nodes"]]).stdout.split()
    assert ended["verdict"] == "config" and ended["cause"].startswith(
        f"{', '.join(hosts)}: {headline}\nremedy: "
    )
    assert f"cause: {', '.join(hosts)}: {headline}" in run.log
    assert (
        json.loads((run.folder / "attempts/0/verdict.json").read_text())["cause"] == ended["cause"]
    )
    assert "S3CRET" not in ended["cause"] + run.log
    assert not (STUB_HOME / "reached").exists()


def test_a_job_ends_when_excluded_hosts_leave_too_few_nodes(runs: dict[str, Run]) -> None:
    """It needs all four nodes, and one was bad: Slurm would keep it pending with BadConstraints."""
    run = runs["no-room"]
    info = run.over()
    assert (info.state, info.exit_code, run.attempts) == (JobState.FAILED, 1, ["0"]), run.log
    (ended,) = run.events("verdict")
    (bad,) = ended["exclude"]
    assert (
        f"without {bad}, which failed or are excluded, partition batch has 3 of the 4 nodes"
        in ended["reason"]
    )
    assert ended["reason"] in run.log
