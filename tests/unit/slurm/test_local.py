"""A run without Slurm, in a detached process, with an agent that only writes verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.run_folder import RunFolder, create_run_folder
from rlpost.cli.runs import job_ids, last
from rlpost.extensions.watching.run_status import statuses
from slurm import local
from slurm.errors import SubmitError
from slurm.executor import submit
from slurm.local import LOG, _on_signal, local_environment
from tests.cluster.lab_host import wait_until
from tests.processes import living
from tests.settings import a_job

STUB_HOME = Path(__file__).parents[2] / "fakes/cluster_home"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The stub agent beside the real ``slurm`` package, as in a code snapshot."""
    folder = tmp_path / "a'; touch x"
    folder.mkdir()
    (folder / "bootstrap").symlink_to(STUB_HOME / "bootstrap")
    for name in ("slurm", "common"):
        (folder / name).symlink_to(Path(__file__).parents[3] / name)
    return folder


def test_a_process_that_ends_before_it_reads_its_job_names_its_log(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        local.pickle, "dumps", lambda spec: bytes(1 << 20)
    )  # more than a pipe holds
    spec = a_job(num_gpus_per_node=1, home=str(home), python="/bin/true")
    with pytest.raises(SubmitError, match=f"ended before it read its job.*see .*/{LOG}"):
        local.start_detached(spec, tmp_path / "submitit")


def start(
    tmp_path: Path, home: Path, behaviour: str, **changes: Any
) -> tuple[RunFolder, psutil.Process]:
    run = create_run_folder(tmp_path / "run", "{}")
    spec = a_job(
        num_gpus_per_node=2,
        gpu_request="none",
        driver_args=(behaviour,),
        python=sys.executable,
        **changes,
    )
    job_id = submit(spec, run, home=home, where="local")
    return run, psutil.Process(int(job_id.removeprefix("local-")))


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def until_ended(process: psutil.Process) -> None:
    assert wait_until(lambda: has_ended(process), deadline_s=60)


def assert_recorded_as_by_a_batch_script(run: RunFolder, verdict: str, pid: int) -> None:
    """The run's page, list and goodput read these events."""
    events = run.ledger.read()
    assert sorted(entry["event"] for entry in events) == ["attempt", "submitted", "verdict"]
    started, ended = (last(events, name) for name in ("attempt", "verdict"))
    assert (started["job_id"], started["num_nodes"]) == (f"local-{pid}", 1)
    assert (ended["attempt"], ended["verdict"], ended["cause"]) == (0, verdict, "told to")
    assert job_ids(run) == [f"local-{pid}"]
    (status,) = statuses([run])
    assert status.verdict == verdict and status.job_id == f"local-{pid}"


def test_a_local_run_calls_the_agent_as_the_batch_script_does(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the GPUs that the user selected."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6")
    run, job = start(tmp_path, home, "done")
    until_ended(job)
    attempt = run.attempts / "0"
    facts = json.loads(next(attempt.glob("argv-*.json")).read_text())
    assert facts["agent"] == ["--attempt-dir", str(attempt), "--num-gpus", "2"]
    assert facts["driver"][1:] == [
        "-u",
        "-m",
        "rlpost.train",
        "done",
        "--cluster-from-stdin",
        "--run-folder",
        str(run.root),
    ]
    assert facts["cwd"] == str(home)
    assert facts["environment"]["SLURM_JOB_ID"] is None
    assert facts["environment"]["CUDA_VISIBLE_DEVICES"] == "5,GPU-6"
    assert_recorded_as_by_a_batch_script(run, "done", job.pid)


@pytest.mark.parametrize(("number", "at_once"), [(signal.SIGTERM, False), (signal.SIGUSR2, True)])
def test_a_signal_to_a_local_run_becomes_a_stop_request(
    number: signal.Signals, at_once: bool, tmp_path: Path, home: Path
) -> None:
    """It asks the run to stop, also before the process has handlers; the agent decides when it ends."""
    run, job = start(tmp_path, home, "wait")
    attempt = run.attempts / "0"
    if not at_once:
        assert wait_until(lambda: any(attempt.glob("argv-*.json")), deadline_s=60)
    assert os.getsid(job.pid) == job.pid, "neither Ctrl-C nor a hang-up of the terminal reaches it"
    job.send_signal(number)
    until_ended(job)
    assert last(run.ledger.read(), "verdict")["verdict"] == "requeue"
    said = json.loads((attempt / "STOP").read_text())
    assert number.name in said["reason"]
    assert said["deadline"] - said["time"] == pytest.approx(4 * 3600, abs=60), (
        "until the time limit"
    )


def test_a_request_to_stop_that_cannot_be_written_does_not_end_a_local_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of the handler would."""
    _on_signal(tmp_path / "missing", signal.SIGTERM, 0.0)
    assert "SIGTERM" in caplog.text and "cannot be written" in caplog.text


def processes_of(attempt: Path) -> list[psutil.Process]:
    """Processes whose command line contains the attempt's folder."""
    found = []
    for process in living():
        with contextlib.suppress(psutil.Error):  # it ended after it was listed
            if str(attempt) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_a_run_whose_process_is_killed_ends_and_is_listed_as_failed(
    tmp_path: Path, home: Path
) -> None:
    run, job = start(tmp_path, home, "wait")
    attempt = run.attempts / "0"
    assert wait_until(lambda: any(attempt.glob("argv-*.json")), deadline_s=60)
    (running,) = statuses([run])
    assert running.state == "RUNNING" and processes_of(attempt)
    (run.root / "engines.json").write_text('[{"targets": ["10.0.0.1:1"], "labels": {}}]')
    job.kill()
    assert wait_until(lambda: not processes_of(attempt), deadline_s=30)
    (killed,) = statuses([run])
    assert killed.state == "FAILED"
    assert killed.reason == f"the process of local-{job.pid} was killed"
    assert (run.root / "engines.json").read_text() == "[]"


def test_a_run_on_the_machine_of_another_host_is_not_called_failed(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "run", "{}")
    run.ledger.append("submitted", job_id="local-999999999", nodes=1, host="elsewhere")
    (found,) = statuses([run])
    assert (found.state, found.reason) == ("UNKNOWN", "it runs or ran on elsewhere; ask there")


def test_the_page_of_a_run_whose_driver_never_started_has_its_cause(
    tmp_path: Path, home: Path
) -> None:
    """Written by the process that ends the run, also over a page that was written before."""
    (home / "rlpost").symlink_to(Path(__file__).parents[3] / "rlpost")
    run, job = start(tmp_path, home, "failed")
    until_ended(job)
    page = run.report_page.read_text()
    assert "told to" in page and "Failure of attempt 0" in page
    assert [entry["event"] for entry in run.ledger.read()].count("verdict") == 1


@pytest.mark.slow
def test_a_local_run_without_verdict_fails_and_names_its_folder(tmp_path: Path, home: Path) -> None:
    run, job = start(tmp_path, home, "crash")
    until_ended(job)
    assert f"see {run.attempts / '0'}" in (run.submitit / LOG).read_text()


def test_a_local_run_is_asked_to_stop_before_its_time_limit(tmp_path: Path, home: Path) -> None:
    run, job = start(tmp_path, home, "wait", time="00:01:00", signal_lead_s=59)
    until_ended(job)
    said = json.loads((run.attempts / "0" / "STOP").read_text())
    assert "SIGALRM" in said["reason"] and said["deadline"] > said["time"] + 30


@pytest.mark.slow
def test_a_debugged_run_is_over_when_submit_returns(tmp_path, home) -> None:
    run = create_run_folder(tmp_path / "run", "{}")
    spec = a_job(
        num_gpus_per_node=2, gpu_request="none", driver_args=("done",), python=sys.executable
    )
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGALRM, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    }
    try:
        assert submit(spec, run, home=home, where="debug") == f"local-{os.getpid()}"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (run.attempts / "0/verdict").read_text().strip() == "done"
    facts = json.loads(next((run.attempts / "0").glob("argv-*.json")).read_text())
    assert facts["agent"][:2] == ["--attempt-dir", str(run.attempts / "0")]
    assert_recorded_as_by_a_batch_script(run, "done", os.getpid())


def test_several_nodes_need_slurm(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "run", "{}")
    with pytest.raises(SubmitError, match="nodes=2"):
        submit(a_job(nodes=2), run, home=tmp_path, where="local")


def test_the_agent_of_a_local_run_sees_no_scheduler() -> None:
    inherited = {"SLURM_JOB_ID": "1", "SUBMITIT_EXECUTOR": "local", "PATH": "/bin"}
    assert local_environment(inherited, "/h") == {
        "PATH": "/bin",
        "PYTHONPATH": "/h",
        "RLPOST_HOME": "/h",
    }
