"""``rlpost sweep``: every point is a run like any other, all are checked before one is submitted."""

from __future__ import annotations

import json
import shlex
from datetime import datetime
from pathlib import Path

import pytest

from common.exit_codes import EXIT_PREEMPTED
from common.run_folder import RunFolder
from rlpost.cli.main import main
from rlpost.errors import ConfigError
from rlpost.extensions.sweep import sweep_verb as sweep
from rlpost.extensions.sweep.sweep_verb import (
    MAX_POINTS,
    parse_grid,
    points_of,
    submitted_arguments,
)
from tests.unit.slurm.stand_ins import commands

GRID = ("--grid", "lr=1e-6,2e-6", "seed=1,2")


@pytest.fixture
def slurm(project: Path, monkeypatch) -> Path:
    """Commands of a Slurm that gives jobs the numbers 1, 2, ... and knows none of them.

    The code is not copied: that takes most of the time of a submission.
    """
    monkeypatch.setattr(
        "rlpost.cli.submit.snapshot_code", lambda project, code, environ: code.symlink_to(project)
    )
    count = f"n=$(($(cat {project}/n 2>/dev/null || echo 0) + 1)); echo $n > {project}/n"
    answers = {"srun": "exit 1"} | dict.fromkeys(("scontrol", "squeue", "sacct"), "exit 0")
    path = commands(project / "bin", **answers, sbatch=f"{count}; echo $n")
    monkeypatch.setenv("PATH", path)
    return project


def error_of(capsys, *arguments: str) -> str:
    assert main(["sweep", *arguments]) == 2
    return capsys.readouterr().err


def test_a_grid_is_every_combination():
    grid = parse_grid(["lr=1e-6,2e-6", "--seed=1,2,3"])
    points = points_of("s", grid)
    assert len(points) == 6
    assert points[1].run == "s-p1"
    assert points[1].arguments == ["--lr", "1e-6", "--seed", "2"]
    assert {tuple(point.values.values()) for point in points} == {
        (lr, seed) for lr in ("1e-6", "2e-6") for seed in "123"
    }
    with pytest.raises(ConfigError, match=f"more than {MAX_POINTS} points"):
        points_of("s", {"lr": [str(n) for n in range(20)], "seed": list("ab") * 10})


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("lr", "must be SETTING=VALUE,VALUE"),
        ("lr=1,", "must be SETTING=VALUE,VALUE"),
        ("lrr=1,2", "no setting lrr"),
        ("lr=1e-6,1e-6", "each value once"),
    ],
)
def test_a_grid_that_means_nothing_is_refused(project, capsys, grid, message):
    assert message in error_of(capsys, "recipe.toml", "--grid", grid)


def test_the_words_of_the_sweep_do_not_reach_its_runs():
    words = ["--grid=lr=1,2", "r.toml", "--grid", "seed=1", "bf16=true,false", "--nodes", "2"]
    words += ["--name=s", "--local"]
    assert submitted_arguments(words) == ["r.toml", "--nodes", "2", "--local"]


def test_a_dry_run_prints_the_scripts_that_submit_would_and_leaves_nothing(project, capsys):
    flags = ["recipe.toml", "--dry-run", "--partition", "low"]
    assert main(["sweep", *flags, *GRID, "--name", "s"]) == 0
    printed = capsys.readouterr().out
    expected = ""
    for number, (lr, seed) in enumerate((lr, seed) for lr in ("1e-6", "2e-6") for seed in "12"):
        own = ["--lr", lr, "--seed", seed, "--run-folder", f"runs/s-p{number}"]
        assert main(["submit", *flags, *own]) == 0
        expected += f"# s-p{number}: lr={lr} seed={seed}\n" + capsys.readouterr().out
    assert printed == expected
    assert not (project / "runs").exists()


def test_a_note_of_all_points_is_printed_once(project, capsys):
    flags = ["--dry-run", "--use-kl-loss", "yes", "--name", "s"]
    assert main(["sweep", "recipe.toml", *flags, *GRID]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(set(notes)) and any("--use-kl-loss" in note for note in notes)


def test_nothing_is_submitted_when_one_point_is_wrong(slurm, capsys):
    message = error_of(capsys, "recipe.toml", "--grid", "lr=1e-6,-1", "--name", "s")
    assert "lr=-1: " in message and "nothing was submitted" in message
    assert not (slurm / "runs").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--run-folder", "x"], "--run-folder: means one run"),
        (["--resume"], "--resume: means one run"),
        (["--lr", "3e-6"], "--lr: --grid has it as well"),
        (["--name", "a/b"], "must be the name of a folder"),
    ],
)
def test_options_that_contradict_a_sweep_are_refused(project, capsys, more, message):
    assert message in error_of(capsys, "recipe.toml", "--dry-run", *GRID, *more)


def test_each_point_is_a_run_with_its_settings_and_its_job(slurm, capsys):
    words = ["sweep", "recipe.toml", *GRID, "--name", "s"]
    assert main(words) == 0
    capsys.readouterr()
    found = {}
    for number in range(4):
        run = RunFolder(slurm / f"runs/s-p{number}")
        config = json.loads(run.run_json.read_text())
        found[run.ledger.read()[-1]["job_id"]] = (
            config["optimizer"]["lr"],
            config["optimizer"]["seed"],
        )
    assert found == {"1": (1e-6, 1), "2": (1e-6, 2), "3": (2e-6, 1), "4": (2e-6, 2)}
    assert "exists; use another name" in error_of(capsys, *words[1:])


def test_list_and_status_say_which_runs_of_a_sweep_have_completed(slurm, capsys):
    """By Slurm as long as it knows a job, then by the run's ledger."""
    assert main(["sweep", "recipe.toml", *GRID, "--name", "s"]) == 0
    known = r"1|COMPLETED|0:00|N/A|n1|None\n2|RUNNING|1:00:00|N/A|n1|None\n"
    commands(slurm / "bin", squeue=f"printf '{known}'")
    for point in (0, 2):
        RunFolder(slurm / f"runs/s-p{point}").ledger.append("done", step=3, weights="x")
    words = ["list", "--runs-dir", str(slurm / "runs"), "--json"]
    states = {"s-p0": "COMPLETED", "s-p1": "RUNNING", "s-p2": "COMPLETED", "s-p3": "UNKNOWN"}
    completed = {name: state for name, state in states.items() if state == "COMPLETED"}
    for more, expected in (([], states), (["--state", "completed"], completed)):
        capsys.readouterr()
        assert main([*words, *more]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert {one["name"]: one["state"] for one in shown} == expected
    for name, state in states.items():
        code = 3 if state == "UNKNOWN" else 0
        assert main(["status", str(slurm / "runs" / name), "--json"]) == code
        assert json.loads(capsys.readouterr().out)["state"] == state


def test_submissions_of_the_same_second_have_their_own_folders_and_jobs(slurm, capsys, monkeypatch):
    class Clock:
        now = staticmethod(lambda: datetime(2026, 1, 2, 3, 4, 5))

    monkeypatch.setattr("rlpost.cli.run_claim.datetime", Clock)
    words = ["submit", "recipe.toml"]
    assert [main(words), main(words)] == [0, 0]
    for number, name in enumerate(("test-20260102-030405", "test-20260102-030405-2")):
        run = RunFolder(slurm / f"runs/{name}")
        assert run.ledger.read()[-1]["job_id"] == str(number + 1)
    assert len(list((slurm / "runs").iterdir())) == 2


def test_two_sweeps_of_the_same_second_do_not_share_a_run(slurm, capsys, monkeypatch):
    class Clock:
        now = staticmethod(lambda: datetime(2026, 1, 2, 3, 4, 5))

    monkeypatch.setattr("rlpost.extensions.sweep.sweep_verb.datetime", Clock)
    assert main(["sweep", "recipe.toml", *GRID]) == 0
    message = error_of(capsys, "recipe.toml", *GRID)
    assert "test-sweep-20260102-030405-p0 exists" in message and "nothing was submitted" in message


def test_a_run_of_another_sweep_is_not_taken_for_a_point(slurm, capsys):
    (slurm / "runs/s-p2").mkdir(parents=True)
    message = error_of(capsys, "recipe.toml", *GRID, "--name", "s")
    assert "runs/s-p2 exists; use another name" in message
    assert [path.name for path in (slurm / "runs").iterdir()] == ["s-p2"]


def test_every_run_gets_the_keys_of_the_environment(slurm, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hush")
    assert main(["sweep", "recipe.toml", *GRID, "--name", "s"]) == 0
    found = [(slurm / f"runs/s-p{number}/secrets.env").read_text() for number in range(4)]
    assert found == ["HF_TOKEN=hush\n"] * 4


def test_a_submission_that_fails_half_way_can_be_completed(slurm, capsys):
    sbatch = slurm / "bin/sbatch"
    works = sbatch.read_text()
    refuses = (
        f"[ -e {slurm}/n ] && [ $(cat {slurm}/n) -ge 2 ] && echo QOSMaxSubmitJob >&2 && exit 1"
    )
    sbatch.write_text(works.replace("#!/bin/bash\n", f"#!/bin/bash\n{refuses}\n"))
    assert main(["sweep", "recipe.toml", *GRID, "--name", "s"]) == 2
    printed = capsys.readouterr()
    assert "s-p2: " in printed.err and "QOSMaxSubmitJob" in printed.err
    assert "2 of 4 runs were submitted" in printed.err
    sbatch.write_text(works)
    commands = [line for line in printed.out.splitlines() if line.startswith("rlpost submit")]
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    jobs = [RunFolder(slurm / f"runs/s-p{number}").ledger.read() for number in range(4)]
    assert [entries[-1]["job_id"] for entries in jobs] == ["1", "2", "3", "4"]


def test_no_further_run_starts_after_one_that_was_stopped(project, monkeypatch, capsys):
    started: list[str] = []

    def submit(words: list[str], **_: object) -> int:
        started.append(Path(words[words.index("--run-folder") + 1]).name)
        return EXIT_PREEMPTED

    monkeypatch.setattr(sweep, "submit_main", submit)
    assert main(["sweep", "recipe.toml", *GRID, "--name", "s", "--local"]) == 1
    assert started == ["s-p0"]
    out = capsys.readouterr().out
    assert out.count("rlpost submit recipe.toml --local --lr") == 3 and "1 of 4 runs" in out


def test_without_a_grid_the_commands_that_show_runs_are_named(project, capsys):
    assert "rlpost compare" in error_of(capsys, "recipe.toml")
