"""The script of engine jobs, run with fake Slurm commands, and rejected specs."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.arrays import FleetSpec, job_and_task, task_name
from slurm.errors import SpecError
from slurm.render import render_fleet
from tests.settings import a_job

ROOT = Path(__file__).parents[3]
SQUEUE = """
case "$*" in *%T*) say=RUNNING;; *) say=1999999999;; esac
case "$*" in *"--jobs=11_1 "*) echo $say;; *"--jobs=11 "*) printf '%s\\n' $say $say;; *) exit 1;; esac"""
"""As Slurm does: the number of an array means all its tasks, with a line for each."""


@pytest.fixture
def job(tmp_path):
    for name in ("logs", "stop"):
        (tmp_path / "run/fleet" / name).mkdir(parents=True)
    return a_job(
        job_name="x",
        gpu_request="none",
        home=str(ROOT),
        python=sys.executable,
        run_folder=str(tmp_path / "run"),
        max_failures=2,
    )


def start(job, tmp_path, agent):
    """Run the script; ``agent`` is the shell text that srun runs."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, text in {
        "srun": agent,
        "squeue": SQUEUE,
        "scontrol": f'[ "$1" != requeue ] || echo "$@" >>{tmp_path}/requeued',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(render_fleet(FleetSpec(job, 2)))
    variables = {
        "SLURM_JOB_ID": "11",  # the last task has the number of the array
        "SLURM_ARRAY_JOB_ID": "11",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_RESTART_COUNT": os.environ.get("SLURM_RESTART_COUNT", ""),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    return subprocess.Popen(
        ["bash", script], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def requeued(tmp_path):
    path = tmp_path / "requeued"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("group", "folder"), [((), "fleet"), (("--group", "judge"), "fleet-judge")]
)
def test_the_agent_gets_the_name_of_its_task_and_the_file_of_its_end(job, tmp_path, group, folder):
    (tmp_path / "run" / folder / "logs").mkdir(parents=True, exist_ok=True)
    job = replace(job, agent_args=("--num-gpus", "2", *group))
    with start(job, tmp_path, f'printf "%s\\n" "$@" >{tmp_path}/words') as script:
        assert script.wait() == 0
    words = (tmp_path / "words").read_text().splitlines()
    run = tmp_path / "run"
    assert words[words.index("rlpost.engines.engine_job") + 1 :] == [
        *("--run-folder", str(run), "--engine", "11_1"),
        *("--stop-file", str(run / folder / "stop/11_1"), "--num-gpus", "2", *group),
    ]


@pytest.mark.parametrize(
    ("code", "again"), [(0, []), (75, ["requeue 11_1"]), (1, ["requeue 11_1"])]
)
def test_the_exit_code_of_the_agent_decides_about_a_requeue(job, tmp_path, code, again):
    with start(job, tmp_path, f"exit {code}") as script:
        script.wait()
    assert requeued(tmp_path) == again


def test_a_task_that_has_ended_for_good_does_not_start_again(job, tmp_path):
    """Slurm 24.05 to 25.11 may start it where users may not change their jobs."""
    for code, starts in ((75, 1), (0, 2), (1, 2)):
        with start(job, tmp_path, f"echo >>{tmp_path}/began; exit {code}") as script:
            assert script.wait() == 0
        assert len((tmp_path / "began").read_text()) == starts


def test_failures_are_requeued_up_to_a_number_and_preemptions_without_one(job, tmp_path):
    codes = []
    for code in (1, 75, 1, 1):
        with start(job, tmp_path, f"exit {code}") as script:
            script.wait()
            codes.append(script.returncode)
    assert len(requeued(tmp_path)) == 3 and codes[-1] == 1


def test_an_engine_whose_time_is_over_before_it_starts_is_requeued(job, tmp_path, monkeypatch):
    """USR2 came before its handler, or during the import of the image."""
    monkeypatch.setattr(sys.modules[__name__], "SQUEUE", SQUEUE.replace("1999999999", "1"))
    with start(job, tmp_path, f"touch {tmp_path}/began; exit 1") as script:
        assert script.wait() == 0
    assert requeued(tmp_path) == ["requeue 11_1"] and not (tmp_path / "began").exists()


def test_failures_that_cannot_be_counted_are_bounded_by_the_starts(job, tmp_path, monkeypatch):
    """A full disk neither ends an engine nor restarts it forever."""
    (tmp_path / "run/fleet/logs/11_1.d/failures").mkdir(parents=True)
    for start_count, again in ((1, 1), (2, 1)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(start_count))
        with start(job, tmp_path, "exit 1") as script:
            script.wait()
        assert len(requeued(tmp_path)) == again


def test_without_requeue_the_job_ends_with_the_agents_code(job, tmp_path):
    with start(replace(job, requeue="never"), tmp_path, "exit 75") as script:
        assert script.wait() == 75
    assert not requeued(tmp_path)


def test_usr2_is_announced_to_the_agent_and_the_file_is_removed_at_the_end(job, tmp_path):
    stop = tmp_path / "run/fleet/stop/11_1"
    stop.write_text("of the start before")
    agent = f"""
touch {tmp_path}/began
until [ -e {stop} ]; do sleep 0.05; done; cat {stop} >{tmp_path}/seen; exit 75"""
    with start(job, tmp_path, agent) as script:
        until = time.monotonic() + 10
        while not (tmp_path / "began").exists() and time.monotonic() < until:
            time.sleep(0.02)
        assert not stop.exists()
        script.send_signal(signal.SIGUSR2)
        script.wait()
    assert "USR2" in (tmp_path / "seen").read_text()
    assert '"deadline": 1999999999.0' in (tmp_path / "seen").read_text()
    assert not stop.exists() and requeued(tmp_path) == ["requeue 11_1"]


def test_a_cancelled_job_is_not_requeued(job, tmp_path):
    agent = f"touch {tmp_path}/began; sleep 1.5; exit 75"
    with start(job, tmp_path, agent) as script:
        until = time.monotonic() + 10
        while not (tmp_path / "began").exists() and time.monotonic() < until:
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        assert script.wait() == 75
    assert not requeued(tmp_path)


def test_what_a_fleet_cannot_be(job):
    with pytest.raises(SpecError, match="engines: 0; use 1 to 1000"):
        FleetSpec(job, 0)
    with pytest.raises(SpecError, match="one node"):
        FleetSpec(replace(job, nodes=2), 1)
    with pytest.raises(SpecError, match="belongs to a run"):
        FleetSpec(replace(job, run_folder=None), 1)
    with pytest.raises(SpecError, match="restarts by requeue"):
        FleetSpec(replace(job, requeue="chain"), 1)


def test_names_of_engines():
    assert job_and_task(task_name("12", 3)) == ("12", 3)
    assert job_and_task("local") is None
