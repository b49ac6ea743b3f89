"""Slurm's commands and a job's steps get no variable that would override their options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm.batch.slurm_job import is_task_of_array
from slurm.render import render_sbatch
from slurm.variables import (
    OTHERS_OF_OURS,
    OURS,
    job_environment,
    submission_environment,
    unknown_variables,
)
from tests.cluster.planted import planted
from tests.settings import a_job

ROOT = Path(__file__).parents[3]
USER = {
    "HOME": "/home/me",
    "SLURM_CONF": "/etc/slurm.conf",
    "SBATCH_ACCOUNT": "rl",
    "SLURMISH": "kept",
}
PLANTED = planted() | {"SUBMITIT_EXECUTOR": "slurm"}


def test_commands_get_where_and_for_whom_a_job_runs_and_nothing_else() -> None:
    plugins = {"_SLURM_SPANK_OPTION_pyxis_container_image": "x", "SPANK_AUKS": "y"}
    assert submission_environment(USER | PLANTED | plugins) == USER


def test_what_a_batch_file_states_has_no_variable_beside_it() -> None:
    """A variable of sbatch wins over the file."""
    script = render_sbatch(a_job(nodes=2, partition="low"))
    chosen = {"SBATCH_PARTITION": "x", "SBATCH_QOS": "y"}
    assert submission_environment(USER | chosen, script) == USER | {"SBATCH_QOS": "y"}


def test_words_of_a_batch_file_that_are_no_options_of_sbatch_hide_nothing() -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=1\nsrun --partition=low # --account\n"
    kept = {"SBATCH_PARTITION": "x", "SBATCH_ACCOUNT": "y"}
    assert submission_environment(kept, script) == kept


def test_steps_get_what_slurm_sets_for_every_job() -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "tiny",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": "/home/me",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_TOPOLOGY_ADDR": "block1.n1",
        "_SLURM_SPANK_OPTION_auks_auks": "yes",
    }
    planted = PLANTED | {"SLURM_JWT": "secret", "SBATCH_ACCOUNT": "rl"} | job
    # Of the submitting shell: an umask, which would win over that of the batch host, a container.
    planted |= {"SLURM_UMASK": "0022", "_SLURM_SPANK_OPTION_pyxis_container_image": "other"}
    assert job_environment(planted | {"PATH": "/bin"}) == job | {"PATH": "/bin"}


def test_a_job_that_was_submitted_from_a_task_of_an_array_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the variables of that array; acting on that task would requeue another's job."""
    monkeypatch.setattr("slurm.batch.slurm_job.STATE_PAUSE_S", 0)
    restarting = "[ -e $0.called ] && echo 9; touch $0.called"
    answers = {"plain": "echo 9", "task": "echo 7_3", "silent": "", "late": restarting}
    for name, answer in answers.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
        (folder / "squeue").chmod(0o755)
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    found = [
        is_task_of_array({**array, "PATH": f"{tmp_path / name}:/usr/bin:/bin"}) for name in answers
    ]
    assert found == [False, True, True, False]
    assert is_task_of_array({**array, "SLURM_JOB_ID": "7", "PATH": str(tmp_path / "plain")})
    assert not is_task_of_array({"SLURM_JOB_ID": "9"})


def test_every_variable_of_ours_is_known_and_a_wrong_one_is_named_with_the_nearest() -> None:
    known = {*OURS, *OTHERS_OF_OURS}
    assert unknown_variables(dict.fromkeys(known, "x")) == []
    files = [
        *(
            path
            for name in ("rlpost", "slurm", "bootstrap", "common", "tools")
            for path in (ROOT / name).rglob("*")
            if path.suffix in (".py", ".sh")
        ),
        *(ROOT / "jobs").rglob("*.toml"),
    ]
    read = {name for path in files for name in re.findall(r"\bRLPOST_[A-Z_]+\b", path.read_text())}
    assert read - {"RLPOST_ASSET"} == known  # that one is an example
    (line,) = unknown_variables({"RLPOST_RUNFOLDER": "x", "HOME": "/"})
    assert line == "RLPOST_RUNFOLDER: no such variable; did you mean RLPOST_RUN_FOLDER?"
