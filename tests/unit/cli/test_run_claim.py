"""Which folder a submission uses, and that two submissions never share one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.run_folder import RunFolder
from common.run_identity import settle_identity
from rlpost.cli.run_claim import claim
from rlpost.cli.runs import LOCAL, newest_job
from rlpost.cli.submit import main
from rlpost.errors import ConfigError
from tests.unit.slurm.stand_ins import commands

ROOT = Path(__file__).parents[3]
# Each submission takes a moment and gets another number; squeue knows those that were accepted.
SBATCH = """[ -e refuses ] && { echo 'sbatch: error: invalid partition specified: low' >&2; exit 1; }
sleep 0.5; mkdir -p jobs.d; number=$(($(ls jobs.d | wc -l) + 70)); touch jobs.d/$number
echo $number"""
SUBMIT = """
import sys
from rlpost.cli import stack_check, submit
stack_check._has_model = lambda config: False
submit.snapshot_code = lambda project, code, environ: code.mkdir(exist_ok=True)
sys.exit(submit.main(sys.argv[1:]))
"""
"""``rlpost.submit`` without the check with transformers and the copy of the code."""
SQUEUE = """for job in $(ls jobs.d 2>/dev/null); do
echo "$job|$(cat state 2>/dev/null || echo PENDING)|1:00|N/A||None"; done"""


@pytest.fixture
def slurm(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster that accepts every job unless there is a file ``refuses``."""
    texts = {"sbatch": SBATCH, "squeue": SQUEUE, "scontrol": "exit 0"}
    texts = {name: f"cd {project}\n{text}" for name, text in texts.items()}
    monkeypatch.setenv("PATH", commands(project / "bin", **texts))
    monkeypatch.setattr("slurm.executor.LOOKUP_S", 0.0)
    monkeypatch.setattr(
        "rlpost.cli.submit.snapshot_code", lambda project, code, environ: code.mkdir(exist_ok=True)
    )
    return project


def test_a_folder_whose_job_is_queued_is_not_used_again(slurm: Path, capsys) -> None:
    """With the same settings and without --resume, too."""
    words = ["recipe.toml", "--run-folder", "run"]
    assert main(words) == 0
    assert main(words) == 2
    assert "job 70 of run is PENDING" in capsys.readouterr().err
    (slurm / "state").write_text("COMPLETED")
    assert main(words) == 0


def test_a_folder_whose_job_may_be_queued_is_not_used_again(
    slurm: Path, capsys, monkeypatch
) -> None:
    """squeue does not answer, as for a cluster whose controller is down; or the job is ending, as
    before it is requeued.
    """
    words = ["recipe.toml", "--run-folder", "run"]
    assert main(words) == 0
    (slurm / "state").write_text("COMPLETING")
    monkeypatch.setattr("rlpost.cli.run_claim.COMPLETING_S", 0)
    assert main(words) == 2
    assert "job 70 of run is ending, or is being requeued" in capsys.readouterr().err
    shown = (slurm / "bin/squeue").read_text()
    (slurm / "bin/squeue").write_text(
        "#!/bin/sh\necho Unable to contact slurm controller >&2; exit 1"
    )
    assert main(words) == 2
    assert "job 70 of run may be queued or run: squeue does not answer: Unable to contact" in (
        capsys.readouterr().err
    )
    (slurm / "bin/squeue").write_text(shown)
    (slurm / "state").write_text("CANCELLED")
    assert main(words) == 0


def test_the_folder_of_a_run_on_this_machine_is_not_used_again(tmp_path: Path) -> None:
    """Its process is a stand-in with slurm.local in its command line."""
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "input()", "slurm.local"], stdin=subprocess.PIPE
    )
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    run.ledger.append("submitted", job_id=f"{LOCAL}{sleeper.pid}")
    settle_identity(run.root)
    copy = RunFolder(shutil.copytree(run.root, tmp_path / "copy"))
    try:
        with (
            pytest.raises(ConfigError, match="run runs on this machine; end it with rlpost cancel"),
            claim(run.root, is_given=True),
        ):
            pass
        with claim(copy.root, is_given=True):  # the job is that of the original
            assert newest_job(copy) is None
    finally:
        sleeper.kill()
        sleeper.wait()
    with claim(run.root, is_given=True) as root:
        assert root == run.root


@pytest.mark.slow
def test_of_two_submissions_at_the_same_moment_one_is_accepted(slurm: Path) -> None:
    command = [sys.executable, "-c", SUBMIT, "recipe.toml", "--run-folder", "run"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert "job 70 of run is PENDING" in "".join(said)
    assert len(list((slurm / "jobs.d").iterdir())) == 1


def test_a_rejected_submission_leaves_no_folder_and_changes_none(slurm: Path, capsys) -> None:
    (slurm / "refuses").touch()
    assert main(["recipe.toml"]) != 0 and main(["recipe.toml", "--run-folder", "new"]) != 0
    said = capsys.readouterr().err
    assert said.count("invalid partition") == 2 and said.count("remedy: choose --partition") == 2
    assert not (slurm / "new").exists() and not list((slurm / "runs").iterdir())
    (slurm / "refuses").unlink()
    assert main(["recipe.toml", "--run-folder", "new"]) == 0
    (slurm / "refuses").touch()
    (slurm / "state").write_text("FAILED")
    assert main(["recipe.toml", "--run-folder", "new", "--resume"]) != 0
    assert (slurm / "new/run.json").exists()


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'Welcome to the cluster'",
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation'"
        " >&2; exit 1",
    ],
)
def test_the_folder_of_a_job_that_may_be_queued_stays(slurm: Path, capsys, answer: str) -> None:
    """Its job would start without code."""
    commands(slurm / "bin", sbatch=answer)
    assert main(["recipe.toml", "--run-folder", "new"]) != 0
    assert "the job may be" in capsys.readouterr().err
    assert (slurm / "new/run.json").exists()


def test_resume_without_a_folder_takes_the_newest_run_of_the_recipe(slurm: Path, capsys) -> None:
    assert main(["recipe.toml", "--resume"]) == 2
    assert "--resume: no run of test in " in capsys.readouterr().err
    for name in ("test-1", "other-2", "test-3", "test-large-4"):
        (slurm / "runs" / name).mkdir(parents=True)
        (slurm / "runs" / name / "run.json").write_text("{}")
        time.sleep(0.02)
    assert main(["recipe.toml", "--resume"]) == 0
    assert "/runs/test-3\n" in capsys.readouterr().out
    assert RunFolder(slurm / "runs/test-3").ledger.read()[-1]["job_id"] == "70"


def test_resume_of_a_folder_that_does_not_exist_names_the_nearest(slurm: Path, capsys) -> None:
    assert main(["recipe.toml", "--run-folder", "runs/mine"]) == 0
    assert main(["recipe.toml", "--run-folder", "runs/mien", "--resume"]) == 2
    assert "no such folder; did you mean 'mine'?" in capsys.readouterr().err
    assert not (slurm / "runs/mien").exists()


@pytest.mark.parametrize("words", [["--run-folder", "run"], []])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "x"), KeyboardInterrupt()]
)
def test_a_folder_that_cannot_be_completed_is_removed(
    slurm: Path, capsys, monkeypatch, words: list[str], error: BaseException
) -> None:
    """Otherwise it is the newest run of every later command."""

    def fail(project: Path, code: Path, environ: dict[str, str]) -> None:
        assert "HF_TOKEN" not in environ
        code.mkdir()
        raise error

    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setattr("rlpost.cli.submit.snapshot_code", fail)
    assert main(["recipe.toml", *words]) in (1, 130)
    assert not (slurm / "run").exists()
    assert [path for path in (slurm / "runs").glob("*")] == []
    (slurm / "run").mkdir()
    assert main(["recipe.toml", "--run-folder", "run"]) in (1, 130)
    assert (slurm / "run").is_dir(), "a folder of the user stays"
    assert not (slurm / "run/secrets.env").exists()


def test_a_folder_whose_job_may_exist_is_kept(tmp_path: Path) -> None:
    for number, name in enumerate(("job.sbatch", "submitit/1_submission.sh")):
        root = tmp_path / str(number)
        with pytest.raises(OSError, match="x"), claim(root, is_given=True):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text("")
            raise OSError("x")
        assert root.is_dir()
