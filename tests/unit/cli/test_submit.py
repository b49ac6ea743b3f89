"""rlpost.submit as a person meets it: a dry run, and bad input refused on the login node with exit
code 2.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.run_identity import settle_identity
from rlpost.cli.main import main as command_line
from rlpost.cli.submit import main
from rlpost.config.checks.export_folder import Marker, mark
from rlpost.config.flags import fields, flag
from rlpost.config.keys import KEYS
from rlpost.train import main as train_main
from tests.unit.slurm.stand_ins import commands

ROOT = Path(__file__).parents[3]


def refused(capsys, *arguments):
    assert main(["recipe.toml", "--dry-run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_dry_run_prints_the_whole_script_and_leaves_nothing(project, capsys):
    assert main(["recipe.toml", "--dry-run", "--nodes", "2", "--partition", "low"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=test\n#SBATCH --nodes=2 ")
    assert "#SBATCH --partition=low" in script and "slurm.batch run --name=test" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert not (project / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["submit", "recipe.toml", "--dry-run"], ["check", "recipe.toml"], ["list"]]
)
def test_what_submits_nothing_loads_neither_submitit_nor_the_training_stack_nor_numpy(
    project, words
):
    """In a fresh interpreter."""
    code = (
        f"import sys; from rlpost.cli.main import main; assert main({words!r}) == 0;"
        "heavy = {'submitit', 'numpy', 'torch', 'transformers', 'ray', 'sglang'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(project / "caches")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_format_of_logs_reaches_the_agent_and_all_that_it_starts(project, capsys):
    assert main(["recipe.toml", "--dry-run", "--log-format", "json"]) == 0
    assert " --log-format json " in capsys.readouterr().out


def test_a_question_about_the_start_leaves_no_key_with_slurm(
    project, tmp_path, monkeypatch, capsys
):
    """sbatch sends its environment with the question as with a job."""
    sbatch = f"env >{tmp_path}/seen; echo 'sbatch: Job 7 to start' >&2"
    monkeypatch.setenv("PATH", commands(tmp_path / "bin", scontrol="exit 0", sbatch=sbatch))
    for name in KEYS:
        monkeypatch.setenv(name, "hf_secret")
    assert main(["recipe.toml", "--test-only"]) == 0
    assert capsys.readouterr().out == "Job 7 to start\n"
    assert "hf_secret" not in (tmp_path / "seen").read_text()


def test_sbatch_hears_neither_of_an_outer_job_nor_of_defaults_for_what_is_given(
    project, tmp_path, monkeypatch
):
    """Variables win over the options of a script."""
    answers = {"scontrol": "exit 0", "srun": "exit 1", "squeue": "exit 0"}
    answers["sbatch"] = f"env >{tmp_path}/seen; echo 7"
    monkeypatch.setenv("PATH", commands(tmp_path / "bin", **answers))
    own = {"SLURM_JOB_ID": "3", "SLURM_CPUS_PER_TASK": "2", "SLURM_HINT": "nomultithread"}
    own["SRUN_CPUS_PER_TASK"] = "2"
    given = {"SBATCH_PARTITION": "debug", "SBATCH_TIMELIMIT": "5", "SBATCH_NO_REQUEUE": "1"}
    given["SBATCH_MEM_PER_CPU"] = "1"
    kept = {"SLURM_CONF": "/etc/s.conf", "SBATCH_ACCOUNT": "rl", "SBATCH_EXPORT": "NONE"}
    own |= given
    for name, value in (own | kept).items():
        monkeypatch.setenv(name, value)
    assert main(["recipe.toml", "--partition", "low"]) == 0
    seen = dict(
        line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line
    )
    assert not own.keys() & seen.keys() and kept.items() <= seen.items()
    assert os.environ["SLURM_JOB_ID"] == "3"


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_run_whose_job_is_there_is_not_submitted_again(
    project, tmp_path, monkeypatch, capsys, state
):
    """The second would replace the code under the first, and drive it out at its next
    checkpoint.
    """
    squeue = f"echo '7|{state}|1:00|N/A|n01|None'"
    answers = {"scontrol": "exit 0", "squeue": squeue, "sbatch": "exit 1"}
    monkeypatch.setenv("PATH", commands(tmp_path / "bin", **answers))
    run = tmp_path / "runs/mine"
    run.mkdir(parents=True)
    (run / "ledger.jsonl").write_text('{"event": "submitted", "job_id": "7"}\n')
    assert main(["recipe.toml", "--run-folder", str(run), "--resume"]) == 2
    assert f"job 7 of mine is {state}" in capsys.readouterr().err
    assert not (run / "code").exists() and not (run / "run.json").exists()


@pytest.mark.parametrize("name", KEYS)
def test_a_key_among_the_variables_of_the_script_is_refused_unseen(project, capsys, name):
    message = refused(capsys, "--environment", f"{name}=hush", "NCCL_DEBUG=INFO")
    assert name in message and "secrets.env" in message and "hush" not in message


def test_without_a_recipe_it_says_how_to_name_one(project, capsys):
    assert main([]) == 2
    assert "rlpost submit tiny" in capsys.readouterr().err


def test_flags_alone_are_a_run_as_well(project, capsys):
    """As scripts of other launchers pass them: no recipe, and the number of nodes follows from who
    needs them.
    """
    files = ["--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--input-key", "prompt"]
    sizes = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "8"]
    batch = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
    assert main([*files, "--label-key", "label", *sizes, *batch, "--dry-run"]) == 0
    assert "#SBATCH --nodes=2 " in capsys.readouterr().out


def test_a_container_sees_what_the_recipe_names_or_the_run_is_refused(project, capsys):
    container = ["--container", "pyxis", "--container-image", "/images/a.sqsh"]
    message = refused(capsys, *container, "--container-mounts", "/shared")
    assert f"--hf-checkpoint {project}/model" in message and "--prompt-data" in message
    assert main(["recipe.toml", "--dry-run", *container, "--container-mounts", str(project)]) == 0


@pytest.mark.parametrize(
    ("flag", "said"), [("--prompt-data", "no such file"), ("--hf-checkpoint", "no such folder")]
)
def test_a_missing_file_is_refused_and_a_note_of_a_dry_run(project, capsys, flag, said):
    assert main(["recipe.toml", flag, "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flag}") and "nowhere" in error and said in error
    assert main(["recipe.toml", flag, "nowhere", "--dry-run"]) == 0
    assert capsys.readouterr().err.startswith(f"note: {flag}")


def test_an_unknown_variable_of_ours_is_noted_before_the_problems_that_it_causes(
    project, monkeypatch, capsys
):
    monkeypatch.setenv("RLPOST_ASSET", "/data")
    note = "note: RLPOST_ASSET: no such variable; did you mean RLPOST_ASSETS?"
    assert main(["recipe.toml", "--dry-run"]) == 0
    assert note in capsys.readouterr().err.splitlines()
    missing = ["recipe.toml", "--prompt-data", "$RLPOST_ASSETS/prompts.jsonl"]
    for verb in ("submit", "check"):
        assert command_line([verb, *missing]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == note and lines[1].startswith("error: ")
    assert command_line(["check", *missing, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["notes"] == [note.removeprefix("note: ")]


@pytest.mark.parametrize(
    "given", [["--nodes", "2"], ["--container", "pyxis", "--container-image", "/i.sqsh"]]
)
def test_what_this_machine_cannot_run_is_refused_before_its_files_are_looked_for(
    project, capsys, given
):
    """Nobody should fetch a model for a run that is refused anyway; and no run folder is left."""
    assert main(["recipe.toml", "--local", *given, "--hf-checkpoint", "nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {given[0]} {given[1]}: --local excludes Slurm, so the run ")
    assert not (project / "runs").exists()


def test_a_dry_run_needs_no_files_and_notes_what_is_missing(tmp_path, monkeypatch, capsys):
    """Without the folder of models too; wrong settings are refused all the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLPOST_ASSETS", raising=False)
    assert main(["qwen3_4b", "--dry-run"]) == 0
    unset = capsys.readouterr()
    assert "$RLPOST_ASSETS is not set" in unset.err and "--mount=$RLPOST_ASSETS" in unset.out
    monkeypatch.setenv("RLPOST_ASSETS", str(tmp_path))
    assert main(["qwen3_4b", "--dry-run"]) == 0
    missing = capsys.readouterr()
    assert "not downloaded yet; run: rlpost fetch qwen3_4b" in missing.err
    assert "run: rlpost convert" not in missing.out and f"--mount={tmp_path} " in missing.out
    assert subprocess.run(["bash", "-n"], input=missing.out, text=True).returncode == 0
    assert main(["qwen3_4b", "--dry-run", "--tensor-model-parallel-size", "3"]) == 2
    assert "--tensor-model-parallel-size 3" in capsys.readouterr().err


WRONG = ("--tensor-model-parallel-size", "3", "--prompt-data", "nowhere.jsonl", "--rm-type", "x")


def test_every_problem_is_told_at_once(project, capsys):
    assert main(["recipe.toml", *WRONG]) == 2
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 3
    assert all(line.startswith("error: ") for line in message.splitlines())


def test_the_help_of_train_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as ended:
        train_main(["--help-all"])
    shown = capsys.readouterr().out
    assert not ended.value.code and all(flag(key) in shown for key in fields())


def test_train_by_hand_says_what_to_use_instead(capsys):
    assert train_main([]) == 2
    assert "rlpost.submit" in capsys.readouterr().err


def test_the_committed_batch_files_are_those_of_their_recipes():
    done = subprocess.run([sys.executable, "-m", "tools.make_jobs", "--check"], cwd=ROOT)
    assert done.returncode == 0, "jobs/*.sbatch differ from their recipes; run make jobs"


@pytest.mark.parametrize("target", ["model", "link", ".", "run", "file"])
def test_an_export_onto_what_is_there_is_refused(project, capsys, target):
    """An export replaces its whole folder, so it may go to none that an export of this run did not
    make.
    """
    (project / "link").symlink_to(project / "model")
    (project / "file").touch()
    line = refused(capsys, "--save-hf", target, "--run-folder", "run/a")
    assert "--save-hf " in line and "such as RUN/hf/{step}" in line


def test_an_export_to_a_new_folder_or_one_of_each_step_is_fine(project, capsys):
    (project / "empty").mkdir()
    for target in ("new/export", "empty", "model/{step}"):
        assert main(["recipe.toml", "--dry-run", "--save-hf", target]) == 0, target


def test_only_the_run_that_made_an_export_may_be_submitted_to_replace_it(project, capsys):
    (project / "run").mkdir()
    (project / "new").mkdir()
    identity = settle_identity(project / "run")
    mark(project / "new", Marker(identity.id, identity.label))
    words = ["recipe.toml", "--dry-run", "--save-hf", "new"]
    assert main([*words, "--run-folder", "run", "--resume"]) == 0
    capsys.readouterr()
    assert "the export of another run" in refused(capsys, "--save-hf", "new")
    shutil.copytree(project / "run", project / "copy")
    message = refused(capsys, "--save-hf", "new", "--run-folder", "copy", "--resume")
    assert f"copy is a copy of the run {project / 'run'}: it gets a new identity" in message
    assert f"the export of another run, {identity.label}" in message
