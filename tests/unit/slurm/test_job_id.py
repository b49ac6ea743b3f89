"""The id of a submitted job, and the cluster on which each later command finds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlpost.cli.runs import find_run, job_ids
from rlpost.extensions.attach.attach_verbs import running_nodes
from rlpost.extensions.attach.job_step import Inside, step_argv
from rlpost.extensions.fleet.fleet_jobs import fleet_views
from slurm.client import ask_to_requeue, cancel, job_info
from slurm.errors import UnknownJobError
from slurm.executor import submit_script
from slurm.job_id import find_by_script, is_job_id, read_submission
from slurm.queue import queue
from slurm.states import JobState
from slurm.supervise import record_start, stalled_attempts
from tests.unit.cli.test_verbs import make_run
from tests.unit.slurm.stand_ins import commands

SCRIPT = "#!/bin/bash\n"
ON_TWO_CLUSTERS = """case $* in
*--clusters=big*) echo "CLUSTER: big"; echo "7_1|RUNNING|1:00|N/A|b1|None" ;;
*) echo "7|PENDING|1:00|N/A||Priority" ;;
esac"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins that write their words into the file returned."""
    said = tmp_path / "said"
    word = f'echo "$(basename $0) $*" >>{said}'
    texts = {name: word for name in ("scancel", "scontrol")}
    path = commands(tmp_path / "bin", **texts, squeue=f"{word}\n{ON_TWO_CLUSTERS}")
    monkeypatch.setenv("PATH", path)
    return said


@pytest.mark.parametrize(
    ("output", "job"),
    [
        ("123\n", "123"),
        ("123;big\n", "123;big"),
        ("*** 2026 budget: job 42 of 500 ***\n77 hours\n123\n", "123"),
        ("123\nthank you\n", "123"),
        ("Submitted batch job 123 on cluster big\n", ""),
        ("job 123\n", ""),
        ("", ""),
    ],
)
def test_a_job_id_is_a_line_of_its_own(output: str, job: str) -> None:
    assert read_submission(output) == job


@pytest.mark.parametrize("word", ["123", "123_4", "123;big", "123_4;big-2"])
def test_a_task_and_a_cluster_are_part_of_an_id(word: str) -> None:
    assert is_job_id(word) and not is_job_id(word + ";") and not is_job_id(" " + word)


def submit(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, squeue: str) -> str:
    path = commands(folder / "bin", sbatch=sbatch, squeue=squeue)
    monkeypatch.setenv("PATH", path)
    return submit_script(SCRIPT, folder / "job.sbatch", 1, os.environ)


def test_a_submission_is_asked_for_its_id_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = f'echo "$*" >{tmp_path}/said; echo "job 42 is free"; echo "123;big"'
    assert submit(tmp_path, monkeypatch, wrapper, "exit 1") == "123;big"
    assert (tmp_path / "said").read_text().startswith("--parsable ")


@pytest.mark.parametrize("printed", ["", "Submitted batch job 42 on cluster big"])
def test_a_job_whose_id_is_hidden_is_found_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    """There is one file for each submission. The number of a banner is not an id."""
    sbatch = f'echo "${{!#}}" >{tmp_path}/file; echo "{printed}"'
    squeue = f'echo "41 /x/y.sh"; echo "123 $(cat {tmp_path}/file)"'
    assert submit(tmp_path, monkeypatch, sbatch, squeue) == "123"
    with pytest.raises(UnknownJobError, match="look for it: squeue --user") as caught:
        submit(tmp_path, monkeypatch, sbatch, "exit 1")
    assert (repr(printed) if printed else "printed nothing") in str(caught.value)


@pytest.mark.parametrize(
    ("shown", "jobs"),
    [
        ("7 /r/job.sbatch\n8 /r/job.sbatch --lr 1\n9 /r/job.sbatch.old\n", ["8"]),
        ("12 /r/job.sbatch\n12 /r/job.sbatch\n", ["12"]),  # tasks of an array
        ("CLUSTER: big\n8 /r/job.sbatch\nCLUSTER: small\n7 /r/job.sbatch\n", ["8;big"]),
        ("", []),
    ],
)
def test_jobs_of_a_file_are_those_of_that_very_file(
    tmp_path: Path, shown: str, jobs: list[str]
) -> None:
    (tmp_path / "shown").write_text(shown)
    environ = {"PATH": commands(tmp_path / "bin", squeue=f"cat {tmp_path}/shown")}
    environ |= {"SBATCH_CLUSTERS": "big,small"} if "CLUSTER" in shown else {}
    assert find_by_script("/r/job.sbatch", environ, but=["7"]) == jobs
    environ["PATH"] = commands(tmp_path / "bin", squeue="exit 1")
    assert find_by_script("/r/job.sbatch", environ) is None


def test_every_command_goes_to_the_cluster_of_its_job(said: Path) -> None:
    cancel("7_1;big")
    ask_to_requeue("7_1;big")
    job_info("7_1;big")
    cancel("7")
    entries = queue(["7", "7_1;big"])
    assert said.read_text().splitlines()[:4] == [
        "scancel --clusters=big 7_1",
        "scancel --clusters=big --batch --signal=USR2 7_1",
        "scontrol --clusters=big --oneliner show job 7_1",
        "scancel 7",
    ]
    assert {job: (entry.job_id, entry.state) for job, entry in entries.items()} == {
        "7": ("7", JobState.PENDING),
        "7_1;big": ("7_1;big", JobState.RUNNING),
    }
    argv = step_argv("7;big", ["id"], nodes=["n1"], inside=Inside(Path("/r"), Path("/c")))
    assert argv[:3] == ["srun", "--clusters=big", "--jobid=7"]


def test_a_step_in_a_task_of_an_array_names_the_number_of_the_task(
    tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun and the name of the container know the task by it (scontrol, JobId)."""
    word = f'echo "scontrol $*" >>{said}'
    shown = "JobId=9 ArrayJobId=7 ArrayTaskId=1 JobState=RUNNING NodeList=b1"
    path = commands(tmp_path / "bin", scontrol=f'{word}\necho "{shown}"')
    monkeypatch.setenv("PATH", path)
    run = make_run(tmp_path / "run", job_id="7_1;big")
    assert running_nodes(run) == ("9;big", ("b1",))
    assert "scontrol --clusters=big --oneliner show job 7_1" in said.read_text()


def test_a_run_keeps_the_cluster_of_its_submission(tmp_path: Path) -> None:
    """Jobs write their number alone, and may start before their submission is recorded."""
    run = make_run(tmp_path / "run")
    for event, job in (
        ("attempt", "7"),
        ("submitted", "7;big"),
        ("attempt", "7"),
        ("chained", "8"),
        ("attempt", "9"),
        ("submitted", "9"),
    ):
        run.ledger.append(event, job_id=job)
    assert job_ids(run) == ["7;big", "8;big", "9"]
    assert find_run("7", tmp_path) == find_run("8;big", tmp_path) == run
    assert job_ids(make_run(tmp_path / "sweep-12_3")) == ["12_3"]


def test_engines_are_known_by_their_number_and_cancelled_on_their_cluster(
    tmp_path: Path, said: Path
) -> None:
    run = make_run(tmp_path / "run")
    run.ledger.append("fleet", array="7;big", engines=2)
    (tmp_path / "run/fleet").mkdir(exist_ok=True)
    found = {one.engine: one.job_id for one in fleet_views(run)}
    assert found == {"7_1": "7_1;big"}


def test_a_cancellation_and_a_submission_name_their_job_with_its_cluster(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.ledger.append("attempt", attempt=0, job_id="7")
    run.ledger.append("submitted", job_id="7;big")
    assert stalled_attempts(run.ledger.read()) == 1  # and not a submission after it
    run.ledger.append("cancelled", job_id="7;big")
    assert not record_start(run.root, 1, "7", "", {})
