"""How a batch script ends when Slurm is slow, silent or refuses: the real script with fake Slurm
commands.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from common.ledger import Ledger
from slurm.batch import once
from slurm.batch import run as batch_run
from slurm.batch.engine import _pass_on
from slurm.batch.host import Host
from slurm.batch.options import Options
from slurm.batch.place import Place
from slurm.batch.signals import STOPS, Signals
from slurm.batch.slurm_job import Record, SlurmJob, seconds_to_query
from slurm.container import Container
from slurm.render import render_conversion, render_sbatch
from slurm.spec import JobSpec
from slurm.submissions import unknown_submissions
from slurm.supervise import count_endings
from tests.settings import a_job
from tests.unit.slurm.stand_ins import commands

ROOT = Path(__file__).parents[3]
FORBIDS_REQUEUE = "scontrol update JobId=7 Requeue=0"
# srun leaves the agents' verdict; squeue is silent so often, then says STATE; whatever else is
# called writes its words.
STAND_INS = {
    "srun": """echo "srun $*" >>called
[ -e run/attempts/latest/verdict ] && exit
[ "$SIGNALLED" ] && kill -$SIGNALLED $PPID &&
until [ -e run/attempts/latest/STOP ]; do /bin/sleep 0.1; done
[ "$TERMINATED" ] && kill -TERM $PPID && /bin/sleep 0.5
echo "$VERDICT" >run/attempts/latest/verdict
for ((n = 0; n < 10 * LINGERS; n++)); do /bin/sleep 0.1; done
echo "srun ended" >>called""",
    "scontrol": """echo "scontrol $*" >>called
[ ! "$COMPLAINT" ] || { echo "$COMPLAINT" >&2; exit 1; }
[ "$(grep -c scontrol called)" -gt "$REFUSALS" ]""",
    "sbatch": """echo "sbatch $*" >>called; env >sbatch.env; printf "$SAYS\\n"
[ ! "$REFUSES" ] || { echo "$REFUSES" >&2; exit 1; }""",
    "squeue": """case $* in
*--Format=*) echo "$RECORD"; exit ;;
*--jobs=6*) echo RUNNING; exit ;;
*--jobs=5*) exit ;;
*%o*) cat shown; exit ;;
*%e) [ "$LEFT" ] && echo $(($(date +%s) + LEFT)); exit $? ;;
esac
echo asked >>asked
[ "$(wc -l <asked)" -gt "$SILENT" ] || { echo 'Unable to contact slurm controller' >&2; exit 1; }
echo "$STATE"
""",
    # The import sends USR2 to the batch process, its grandparent, and then takes long.
    "enroot": """[ "$1" = import ] || exit 0
kill -USR2 "$(ps -o ppid= $PPID)"; /bin/sleep 8; echo "import ended" >>called""",
}


def run(
    folder: Path,
    *,
    container: Container | None = None,
    spare_nodes: int = 0,
    spec: JobSpec | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
    at: str = "run",
    flags: Sequence[str] = (),
    script: str = "",
    lead_s: int = 120,
    **given: object,
) -> tuple[int, list[str], str]:
    """Exit code, called commands, and the log.

    Args:
        at: the run folder.
        flags: words after the file.
        script: the batch file; by default that of ``spec``.
        lead_s: time before the end of the job at which Slurm sends USR2.
    """
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        text = text.replace("run/attempts", f"{at}/attempts")
        (commands / name).write_text(f"#!/bin/bash\ncd {folder}\n{text}\n")
        (commands / name).chmod(0o755)
    spec = spec or a_job(
        home=str(ROOT),
        python=sys.executable,
        run_folder=str(folder / "run"),
        container=container,
        spare_nodes=spare_nodes,
        signal_lead_s=lead_s,
    )
    stand_ins = {
        "VERDICT": "requeue",
        "STATE": "RUNNING",
        "SILENT": "0",
        "LINGERS": "0",
        "LEFT": "",
        "SIGNALLED": "",
        "TERMINATED": "",
        "REFUSALS": "0",
        "SAYS": "hours left: 1000",
        "RECORD": "",
        "REFUSES": "",
        "COMPLAINT": "",
    }
    stand_ins |= {name.upper(): str(value) for name, value in given.items()}
    stand_ins |= {
        **environ,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n01",
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    (folder / "job.sbatch").write_text(script or render_sbatch(spec))
    with (folder / "log").open("w") as log:  # a file: srun outlives the script
        done = subprocess.run(
            ["bash", folder / "job.sbatch", *flags],
            env=stand_ins,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
    path = folder / "called"
    called = path.read_text().splitlines() if path.exists() else []
    return (
        done.returncode,
        [line for line in called if "squeue" not in line and "srun --help" not in line],
        (folder / "log").read_text(),
    )


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Handlers of signals, until the end of the test."""
    numbers = [getattr(signal, name) for name in (*STOPS, "SIGTERM", "SIGCHLD")]
    before = [signal.getsignal(number) for number in numbers]
    signals = Signals()
    yield signals
    os.close(signal.set_wakeup_fd(-1))
    os.close(signals._awake)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_request_to_stop_while_the_image_is_imported_does_not_wait_for_it(
    tmp_path: Path,
) -> None:
    """The import may take longer than the job has; after its end a job cannot be requeued."""
    code, called, log = run(
        tmp_path, container=Container("enroot", "r.org#rl:9", cache=str(tmp_path))
    )
    assert code == 0 and called[-1] == "scontrol requeue 7", log
    assert "import ended" not in called and not any("--output" in line for line in called)
    (entry,) = (
        entry
        for entry in Ledger(tmp_path / "run/ledger.jsonl").read()
        if entry["event"] == "verdict"
    )
    assert entry["verdict"] == "requeue" and entry["reason"].startswith(
        "requeue after a preemption"
    )


def test_a_requeue_that_a_busy_controller_refuses_is_repeated(tmp_path: Path) -> None:
    code, called, log = run(tmp_path, refusals=1)
    assert code == 0 and called[-2:] == ["scontrol requeue 7"] * 2, log


def test_a_requeue_that_was_accepted_too_late_to_answer_is_not_repeated(tmp_path: Path) -> None:
    job = commands(
        tmp_path / "bin", scontrol=f"echo $1 >>{tmp_path}/called; exit 1", squeue="echo PENDING"
    )
    assert SlurmJob({"SLURM_JOB_ID": "7", "PATH": job}).requeue() is None
    assert (tmp_path / "called").read_text() == "requeue\n"


def test_a_container_is_not_removed_after_the_job_was_ended(tmp_path: Path) -> None:
    """srun can start no step then, and would print errors about the allocation."""
    container = Container("enroot", str(tmp_path / "image.sqsh"))
    _, called, log = run(tmp_path, container=container, terminated="yes", state="COMPLETING")
    assert "a container may be left" in log
    assert not any(line.startswith("scontrol") for line in called), log


def test_storage_that_answers_with_errors_for_a_moment_ends_no_run(
    tmp_path: Path, signals: Signals
) -> None:
    """Path.exists raises most errors (here ENAMETOOLONG, as ESTALE of NFS) in place of False."""
    host = Host("batch", {"SLURM_JOB_ID": "7", "PATH": "/nowhere"}, signals)
    step = subprocess.Popen(["sleep", "0.1"])
    assert batch_run._wait(host, Options(), step, tmp_path / ("x" * 300)) == 0


def test_a_start_that_cannot_be_noted_is_a_start(tmp_path: Path, signals: Signals) -> None:
    host = Host("batch", {"SLURM_JOB_ID": "7", "PATH": "/nowhere"}, signals)
    attempt = batch_run.Attempt(0, tmp_path / "missing", tmp_path)
    place = Place("/", str(tmp_path), "python3", "none", "", "name", ())
    assert batch_run._record_start(host, place, attempt)


def test_a_chain_has_the_account_and_place_of_its_first_job(tmp_path: Path) -> None:
    """Also if sbatch prints Latin-1, and if the ledger cannot be written."""
    (tmp_path / "run/ledger.jsonl").mkdir(parents=True)
    spec = a_job(
        home=str(ROOT),
        python=sys.executable,
        run_folder=str(tmp_path / "run"),
        partition="low",
        requeue="chain",
    )
    (tmp_path / "run/job.sbatch").write_text(render_sbatch(spec))
    environ = {
        "SBATCH_QOS": "long",
        "SBATCH_EXPORT": "NONE",
        "SLURM_JOB_ACCOUNT": "rl",
        "SLURM_JOB_PARTITION": "other",
    }
    code, _, log = run(tmp_path, spec=spec, environ=environ, says=r"\351t\351\n8")
    assert code == 0 and "rlpost cancel does not know job 8" in log
    variables = (tmp_path / "sbatch.env").read_text().splitlines()
    chosen = sorted(line for line in variables if line.startswith("SBATCH_"))
    assert chosen == ["SBATCH_ACCOUNT=rl", "SBATCH_QOS=long"]  # the file states the partition


@pytest.mark.parametrize(("terminated", "final"), [("", [FORBIDS_REQUEUE]), ("yes", [])])
def test_a_conversion_that_slurm_preempts_may_be_requeued_again(
    tmp_path: Path, terminated: str, final: list[str]
) -> None:
    spec = a_job(home=str(ROOT), python=sys.executable, run_folder=str(tmp_path / "run"))
    script = render_conversion(spec, str(tmp_path / "weights"))
    (tmp_path / "run/attempts/latest").mkdir(parents=True)  # of the stand-in of srun
    code, called, log = run(
        tmp_path, script=script, terminated=terminated, environ={"MASTER_ADDR": "n01"}
    )
    assert code == 1 and [line for line in called if line.startswith("scontrol")] == final, log


def test_conversions_side_by_side_on_a_node_have_other_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each uses two ports; another process listens on one of the first pair."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        first = taken.getsockname()[1] // 2 * 2
        monkeypatch.setattr(once, "FIRST_PORT", first)
        assert once.free_pair(0) >= first + 2
        assert once.free_pair(0) % 2 == 0


def test_a_server_of_sandboxes_gets_usr2_when_it_can_handle_it(tmp_path: Path) -> None:
    step = subprocess.Popen(["sleep", "9"])
    assert not _pass_on(step, tmp_path / "record") and step.poll() is None
    (tmp_path / "record").touch()
    assert _pass_on(step, tmp_path / "record")
    assert step.wait(9) == -signal.SIGUSR2


def test_a_controller_that_is_restarting_costs_no_run(tmp_path: Path) -> None:
    _, called, log = run(tmp_path, silent=1)
    assert called[-1] == "scontrol requeue 7", log


def test_a_job_that_lost_a_node_is_requeued_with_as_many_as_it_asked_for(tmp_path: Path) -> None:
    """Slurm would start it with one node less each time, and finally with too few."""
    code, called, _ = run(tmp_path, spare_nodes=2)
    assert code == 0
    orders = [line for line in called if line.startswith("scontrol")]
    assert orders == ["scontrol requeue 7", "scontrol update JobId=7 NumNodes=3"]
    steps = [line for line in called if line.startswith("srun ") and " --no-kill" in line]
    assert sum("slurm.batch watch requeue 3" in line for line in steps) == 1
    assert any("--num-nodes 1 --spare-nodes 2" in line for line in steps)


def test_a_job_that_slurm_ends_is_not_requeued(tmp_path: Path) -> None:
    code, called, log = run(tmp_path, state="COMPLETING")
    assert code == 75 and not any(line.startswith("scontrol") for line in called), log
    assert "job state is COMPLETING" in log


def test_a_cancelled_job_that_was_requeued_all_the_same_ends_before_it_begins(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    Ledger(tmp_path / "run/ledger.jsonl").append("cancelled", job_id="7")
    code, called, log = run(tmp_path)
    assert code == 75 and called == [FORBIDS_REQUEUE], log
    assert "was cancelled" in log and "is not counted" not in log


@pytest.mark.parametrize(("verdict", "code"), [("done", 0), ("config", 78)])
def test_the_end_of_a_job_is_final(tmp_path: Path, verdict: str, code: int) -> None:
    """Slurm 24.05 to 25.11 starts a job again that was preempted once, whatever its exit code.

    The page of a failure is written even where the setup commands are what fails.
    """
    spec = a_job(
        home=str(ROOT),
        python=sys.executable,
        run_folder=str(tmp_path / "run"),
        setup_commands=("exit 3",),
    )
    ended, called, log = run(tmp_path, spec=spec, verdict=verdict)
    assert ended == code and called[-1] == FORBIDS_REQUEUE, log
    page = tmp_path / "run/report/report.html"  # the driver writes that of a run that is done
    assert page.exists() == (verdict != "done"), log
    assert not page.exists() or "in the queue" not in page.read_text(), "it shows the end"


def test_a_ledger_that_cannot_be_written_costs_no_preempted_run(tmp_path: Path) -> None:
    (tmp_path / "run/ledger.jsonl").mkdir(parents=True)
    code, called, log = run(tmp_path)
    assert code == 0 and called[-1] == "scontrol requeue 7", log
    assert "this start is not counted" in log and "the budgets cannot be read" in log


def test_a_request_to_stop_from_before_the_handler_is_recognised_by_the_end_of_the_job(
    tmp_path: Path,
) -> None:
    """Agents are not started: extracting their image could take the time that is left."""
    _, called, log = run(tmp_path, left=100)
    assert called == ["scontrol requeue 7"], log
    assert "cause: the agents were not started: the job ends in " in log and "USR2" not in log
    reason = json.loads((tmp_path / "run/attempts/0/STOP").read_text())["reason"]
    assert reason.endswith(" s (--signal-lead-s 120)")


def test_each_task_of_an_array_is_a_run_of_its_own(tmp_path: Path) -> None:
    """The last task has the number of the array, which means all tasks in Slurm's commands."""
    spec = a_job(job_name="sweep", driver_args=("recipe.toml",), python=sys.executable)
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "RLPOST_HOME": str(tmp_path)}
    for name in ("slurm", "common"):
        (tmp_path / name).symlink_to(ROOT / name)
    code, called, log = run(tmp_path, spec=spec, environ=task, at="runs/sweep-7_3")
    assert code == 0 and called[-1] == "scontrol requeue 7_3", log
    (entry, *_) = Ledger(tmp_path / "runs/sweep-7_3/ledger.jsonl").read()
    assert entry["job_id"] == "7_3"
    task["RLPOST_RUN_FOLDER"] = "mine"
    _, _, log = run(tmp_path, spec=spec, environ=task, at="mine-3")
    assert f"{tmp_path}/mine-3/attempts/0" in log


def test_an_array_is_not_told_to_resume(tmp_path: Path) -> None:
    """``--resume`` would mean one run; each task resumes the folder that it finds."""
    spec = a_job(job_name="sweep", driver_args=("recipe.toml",), python=sys.executable)
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "RLPOST_HOME": str(tmp_path)}
    for name in ("slurm", "common"):
        (tmp_path / name).symlink_to(ROOT / name)
    code, _, log = run(tmp_path, spec=spec, environ=task, flags=["--lr=1e-6", "--resume"])
    assert code == 78 and "--resume: " in log and "use export RLPOST_RUN_FOLDER=" in log
    assert not (tmp_path / "runs").exists()


def test_an_array_of_one_run_folder_is_refused(tmp_path: Path) -> None:
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    code, _, log = run(tmp_path, environ=task)
    assert code == 78 and "--array: all tasks would write to" in log
    assert not (tmp_path / "run").exists()


def test_a_chain_takes_no_number_from_a_banner(tmp_path: Path) -> None:
    """It finds the job by its file, and leaves itself out."""
    spec = a_job(
        home=str(ROOT), python=sys.executable, run_folder=str(tmp_path / "run"), requeue="chain"
    )
    script = tmp_path / "run/job.sbatch"
    (tmp_path / "shown").write_text(f"8 {script}\n7 {script}\n9 /other")
    code, _, log = run(tmp_path, spec=spec)
    assert code == 0 and "printed 'hours left: 1000', which does not name one job id" in log
    entries = Ledger(tmp_path / "run/ledger.jsonl").read()
    assert [entry["job_id"] for entry in entries if entry["event"] == "chained"] == ["8"], log


LOST = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize(
    ("shown", "complaint", "outcome"),
    [
        ("8 {script}\n7 {script}", LOST, "chained"),
        ("7 {script}", LOST, "unknown"),
        ("7 {script}", "sbatch: error: Batch job submission failed: Invalid qos", "rejected"),
    ],
)
def test_the_next_job_of_a_chain_is_looked_up_before_it_counts_as_refused(
    tmp_path: Path, shown: str, complaint: str, outcome: str
) -> None:
    """The ledger says which of three it is; where there is no job, its decision is corrected."""
    spec = a_job(
        home=str(ROOT),
        python=sys.executable,
        run_folder=str(tmp_path / "run"),
        requeue="chain",
        signal_lead_s=1,
    )
    (tmp_path / "shown").write_text(shown.format(script=tmp_path / "run/job.sbatch"))
    code, _, log = run(tmp_path, spec=spec, refuses=complaint, left=7)
    entries = Ledger(tmp_path / "run/ledger.jsonl").read()
    events = [entry["event"] for entry in entries if entry["event"] != "attempt"]
    chained = [entry["job_id"] for entry in entries if entry["event"] == "chained"]
    if outcome == "chained":
        assert code == 0 and events == ["verdict", "submitting", "chained"], log
        assert chained == ["8"] and not unknown_submissions(entries)
        return
    assert code == 75 and not chained and entries[-1]["answer"] == 75, log
    assert entries[-1]["correction"] and count_endings(entries, is_preempted=True) == 1
    assert bool(unknown_submissions(entries)) == (outcome == "unknown")
    assert ("is not known" if outcome == "unknown" else "--resume") in entries[-1]["reason"]


DISABLED = "Requested operation is presently disabled for job 7"


@pytest.mark.parametrize("given", [{"record": "0 0 1:00:00"}, {"complaint": DISABLED}])
def test_a_run_continues_in_a_new_job_where_slurm_forbids_to_requeue_it(
    tmp_path: Path, given: dict[str, str]
) -> None:
    code, called, log = run(tmp_path, says="8", **given)
    (line,) = (line for line in called if line.startswith("sbatch"))
    assert code == 0 and "--dependency=afterany:7" in line, log
    assert Ledger(tmp_path / "run/ledger.jsonl").read()[-1]["job_id"] == "8"
    requeues = [line for line in called if line == "scontrol requeue 7"]
    assert len(requeues) == ("complaint" in given)
    said_first = log.splitlines()[0]
    assert ("--requeue chain" in said_first) == ("record" in given)


def test_a_plain_batch_file_says_how_to_restart_where_slurm_forbids_it(
    tmp_path: Path, signals: Signals
) -> None:
    """Options of sbatch's command line would be lost in a new job."""
    spec = a_job(job_name="one", driver_args=("recipe.toml",), python=sys.executable)
    for name in ("slurm", "common"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {"RLPOST_HOME": str(tmp_path)}
    code, called, log = run(
        tmp_path, spec=spec, environ=environ, at="runs/one-7", complaint=DISABLED
    )
    assert code == 75 and not any(line.startswith("sbatch") for line in called), log
    decided = Ledger(tmp_path / "runs/one-7/ledger.jsonl").read()[-1]
    assert decided["answer"] == 75 and "--requeue chain" in decided["reason"]
    assert "--resume" in decided["reason"]
    host = Host("batch", {"SLURM_JOB_ID": "7"}, signals)
    host.record = Record(may_requeue=False)
    assert "--requeue chain" in batch_run._why_no_restart(host, Options(script="one.sbatch"))
    assert batch_run._why_no_restart(host, Options()) == ""  # a new job resumes it


def test_a_job_that_slurm_requeues_itself_is_not_said_to_end(tmp_path: Path) -> None:
    _, called, log = run(tmp_path, state="PENDING")
    assert "Slurm requeues the job itself" in log and "not requeued" not in log
    assert "scontrol requeue 7" not in called


def test_a_time_limit_below_the_signals_lead_is_named_before_anything_starts(
    tmp_path: Path,
) -> None:
    code, called, log = run(tmp_path, record="0 1 2:00", lead_s=300, left=118)
    assert code == 78 and called == [FORBIDS_REQUEUE], log
    assert "time limit of this job is 120 s, and --signal-lead-s 300" in log
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ended", "code"),
    [({"verdict": "config", "answer": 78}, 78), ({"verdict": "requeue", "answer": "again"}, None)],
)
def test_a_job_that_has_ended_for_good_does_not_start_again_whatever_slurm_does(
    tmp_path: Path, ended: dict[str, object], code: int | None
) -> None:
    """No right to change the job is needed."""
    (tmp_path / "run").mkdir()
    ledger = Ledger(tmp_path / "run/ledger.jsonl")
    ledger.append("attempt", attempt=0, job_id="7")
    ledger.append("verdict", attempt=0, **ended)
    done, called, log = run(tmp_path, record="1 1 1:00:00", verdict="done")
    has_started = any(line.startswith("srun ") for line in called)
    assert has_started == (code is None) and done == (code or 0), log
    assert (tmp_path / "run/attempts").exists() == has_started


@pytest.mark.parametrize(("other", "starts"), [("6", False), ("5", True)])
def test_of_two_jobs_of_a_run_the_second_ends_while_the_first_has_its_nodes(
    tmp_path: Path, other: str, starts: bool
) -> None:
    """Job 6 runs; job 5 was killed before it could leave a verdict."""
    (tmp_path / "run").mkdir()
    Ledger(tmp_path / "run/ledger.jsonl").append("attempt", attempt=0, job_id=other)
    code, _, log = run(tmp_path, verdict="done")
    assert code == (0 if starts else 78) and (f"scancel {other}" in log) == (not starts), log
    assert (tmp_path / "run/attempts").exists() == starts


def test_every_announcement_of_an_end_is_a_stop_request(tmp_path: Path) -> None:
    _, called, log = run(tmp_path, signalled="HUP")
    stop = json.loads((tmp_path / "run/attempts/0/STOP").read_text())
    assert stop["reason"] == "signal HUP to the batch script", log
    assert called[-1] == "scontrol requeue 7", log


@pytest.mark.parametrize("name", STOPS)
def test_a_signal_that_would_end_the_batch_script_is_a_stop_request(
    signals: Signals, name: str
) -> None:
    os.kill(os.getpid(), getattr(signal, name))
    signals.wait(10)
    signals.request_stop("later")
    assert signals.stopped and not signals.terminated
    assert signals.reason.startswith(f"signal {name[3:]} to the batch script")


def test_attempts_and_containers_do_not_take_the_number_of_another_job(tmp_path: Path) -> None:
    """sbatch was called in a job with five restarts; attempt 0 of this run is removed."""
    (tmp_path / "run/attempts/3").mkdir(parents=True)
    container = Container("enroot", str(tmp_path / "image.sqsh"))
    environ = {"SLURM_RESTART_COUNT": "5"}
    _, called, log = run(
        tmp_path, container=container, environ=environ, record="0 1 1:00:00", left=3000
    )
    assert f"attempt 4 on n01: {tmp_path}/run/attempts/4" in log
    assert any("enroot.py remove enroot rlpost_7_0" in line for line in called), called
    end = int((tmp_path / "run/attempts/4/end_time").read_text())  # for agents without squeue
    assert end - time.time() == pytest.approx(3000, abs=60)


def test_the_end_of_the_job_is_queried_again_before_a_stop_would_be_due() -> None:
    """At most every ten minutes; within a minute of that time every 30 s."""
    assert seconds_to_query(0, None, 100) == seconds_to_query(0, 9000, 100) == 600
    now, queries = 0.0, []
    while now < 900:
        now += seconds_to_query(now, 1000, 100)
        queries.append(now)
    assert queries[0] == 600 and 840 in queries and queries[-2] > 840


def test_a_moved_end_reaches_the_file_of_the_agents(
    tmp_path: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extension is written, and that there is no limit any more; a limit that was cut below the
    lead is a stop request.
    """
    ends = iter([2000.0, 5000.0, math.inf, 1100.0])
    monkeypatch.setattr(SlurmJob, "end_time", lambda self: next(ends))
    clock = [1000.0]
    monkeypatch.setattr("slurm.batch.host.time.time", lambda: clock[0])
    host, file = Host("batch", {"SLURM_JOB_ID": "7"}, signals), tmp_path / "end_time"
    host.note_end_time(100, file)
    for moment, written, stops in (
        (1001, "2000", False),
        (1850, "5000", False),
        (2500, "none", False),
        (3200, "1100", True),
    ):
        clock[0] = moment
        host.refresh_end_time(100, file)
        assert file.read_text() == f"{written}\n" and signals.stopped == stops


def test_an_srun_that_lingers_costs_no_run_whose_time_is_nearly_over(tmp_path: Path) -> None:
    """Agents write their verdict ten seconds before the end even if something hangs; after the end
    a job cannot be requeued.
    """
    _, called, log = run(tmp_path, left=7, lingers=10, lead_s=6)
    assert "srun ended" not in called and called[-1] == "scontrol requeue 7", log


@pytest.mark.parametrize(("left", "seconds"), [(30, 30), ("", 120)])
def test_a_stop_request_has_a_deadline_also_when_slurm_does_not_tell_it(
    tmp_path: Path, left: int | str, seconds: int
) -> None:
    """A driver without a deadline would use all the time, and the job would end before it is
    requeued.
    """
    _, called, log = run(tmp_path, left=left, signalled="USR2", lead_s=seconds - 5 if left else 120)
    stop = json.loads((tmp_path / "run/attempts/0/STOP").read_text())
    assert int(stop["deadline"]) - stop["time"] == pytest.approx(seconds, abs=3), log
    assert called[-1] == "scontrol requeue 7", log


@pytest.mark.parametrize(
    ("left", "seconds"), [(None, 60), (math.inf, 60), (3600, 60), (25, 20), (3, 1)]
)
def test_a_container_is_removed_in_the_time_that_is_left(
    left: float | None, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = None if left is None else time.time() + left
    monkeypatch.setattr(SlurmJob, "end_time", lambda self: end)
    assert seconds - 1 <= SlurmJob({}).seconds_within(60) <= seconds


def test_a_container_of_a_run_is_removed_after_its_agents(tmp_path: Path) -> None:
    _, called, log = run(tmp_path, container=Container("enroot", str(tmp_path / "image.sqsh")))
    (removal,) = (line for line in called if "enroot.py remove enroot rlpost_7_0" in line)
    assert called.index(removal) > called.index("srun ended"), log


def test_a_batch_host_without_python_says_so_in_one_line(tmp_path: Path) -> None:
    script = render_sbatch(a_job(home=str(ROOT), run_folder=str(tmp_path / "run")))
    done = subprocess.run(
        ["/bin/bash"], input=script, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 78 and not done.stderr and not (tmp_path / "run").exists()
    assert done.stdout == f"no python3 on {os.uname().nodename}; install 3.6 or newer\n"
