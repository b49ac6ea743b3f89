"""``rlpost evaluate``: what is submitted, and which weights a step of a run has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.run_folder import RunFolder
from rlpost.cli import evaluate
from rlpost.cli.evaluate import MAKER, convert, main, remove_leftovers, weights_of
from rlpost.config.load import dump, files_of, load
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.durable.commit import begin, commit
from rlpost.errors import ConfigError
from tests.cluster.lab_host import wait_until


def run_of(root: Path, *steps: int, **checkpoint: Any) -> tuple[RunFolder, Config]:
    run = RunFolder(root)
    run.checkpoints.mkdir(parents=True)
    for step in steps:
        writing = begin(run.checkpoints, step)
        (writing / "weights").write_text("w")
        commit(writing)
    config = load([], {"checkpoint": {"hf_checkpoint": str(root), **checkpoint}}).config
    run.run_json.write_text(dump(config))
    return run, config


def test_the_weights_of_a_step_are_exported_ones_or_a_committed_checkpoint(tmp_path: Path) -> None:
    template = str(tmp_path / "hf-{step}")
    run, config = run_of(tmp_path / "run", 10, 20, save_hf=template)
    begin(run.checkpoints, 30)  # not committed
    assert weights_of(run, config, None) == (20, run.checkpoints / "iter_0000020")
    assert weights_of(run, config, 10) == (10, run.checkpoints / "iter_0000010")
    (tmp_path / "hf-15").mkdir()
    (tmp_path / "hf-15" / "config.json").write_text("{}")
    assert weights_of(run, config, 15) == (15, tmp_path / "hf-15")
    for step in (30, 5):
        with pytest.raises(ConfigError, match=f"--step {step}: .*no checkpoint of it.*: 10, 20"):
            weights_of(run, config, step)
    empty, config = run_of(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"--step \(newest\): .*checkpoints of the steps: none"):
        weights_of(empty, config, None)


def test_a_folder_that_each_export_replaces_is_not_taken_for_that_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "config.json").write_text("{}")
    run, config = run_of(tmp_path / "run", 10, save_hf=str(tmp_path / "latest"))
    assert weights_of(run, config, 10)[1] == run.checkpoints / "iter_0000010"


def test_adapters_are_refused_with_the_remedy(tmp_path: Path) -> None:
    run, config = run_of(tmp_path / "run", 10)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"lora_rank": 8})})
    with pytest.raises(
        ConfigError, match=r"has adapters.* --save-hf exported with --lora-export merged"
    ):
        weights_of(run, config, 10)


def test_a_conversion_that_fails_leaves_no_folder(tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(ConfigError, match=r"was not converted .*exit code 1"):
        convert(tmp_path / "none", str(tmp_path / "no-model"), tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import sys, time
from pathlib import Path
from rlpost.cli import evaluate
evaluate.subprocess.run = lambda command: (Path(command[command.index("--output-dir") + 1]).mkdir(), time.sleep(60))
evaluate.convert(Path("x"), "m", Path(sys.argv[1]))
"""


def test_the_folder_of_a_killed_conversion_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, target = tmp_path / "run", tmp_path / "run" / "hf_0000010"
    killed.mkdir()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(target)])
    assert wait_until(lambda: bool([*killed.glob(".hf_0000010.*/hf")]), deadline_s=60)
    others = [killed / ".hf_0000010.mine", killed / ".hf_00000100.x", killed / "hf_0000020"]
    for other in others:
        other.mkdir()
    (others[1] / MAKER).write_text('{"host": "elsewhere", "pid": 1, "started": 1}')
    remove_leftovers(target)
    assert len([*killed.iterdir()]) == 4, "the process is alive"
    process.kill()
    process.wait()

    def converted(command: list[str]) -> SimpleNamespace:
        folder = Path(command[command.index("--output-dir") + 1])
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return SimpleNamespace(returncode=0)

    synced: list[str] = []
    monkeypatch.setattr("rlpost.cli.evaluate.subprocess.run", converted)
    monkeypatch.setattr("rlpost.cli.evaluate.sync", lambda path: synced.append(path.name))
    assert convert(tmp_path / "x", "m", target) == target
    assert sorted(killed.iterdir()) == sorted([*others, target])
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert synced == ["config.json", "hf", "run"], "files before their folder, the rename last"


def test_an_interrupted_conversion_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(command: list[str]) -> None:
        Path(command[command.index("--output-dir") + 1]).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("rlpost.cli.evaluate.subprocess.run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "x", "m", tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_engines_beside_training_are_not_started_without_a_trainer(tmp_path: Path) -> None:
    recipe = tmp_path / "beside.toml"
    recipe.write_text(
        'base = "tiny"\n[eval]\neval_engines = "evaluator"\n'
        "[engines.evaluator]\nfollows_policy = true\ngpus = 3\n"
        '[engines.judge]\nmodel = "assets/tiny"\n'
    )
    files = files_of(recipe, {})
    config = load(files, {"debug": {"debug_rollout_only": True}}).config
    assert [*config.engines.groups] == ["judge"] and config.eval.eval_engines is None
    trained = load(files, {}).config
    assert len(trained.engines.groups) == 2 and trained.eval.eval_engines == "evaluator"


def test_what_is_missing_is_said_before_anything_is_created(tmp_path: Path) -> None:
    for words, message in (
        ([], "which recipe"),
        (["--hf-checkpoint", "m"], "which recipe"),
        (["tiny", "--step", "3"], "--step 3 needs the run"),
        (["--run-folder", str(tmp_path / "no-run")], "neither a run folder"),
        (["tiny", "--eval-prompt-data", "--out", str(tmp_path / "x")], "eval"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(words)
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_of_a_run_does_not_wait_for_the_job_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That job is over: Slurm may refuse a dependency on one that it has forgotten."""
    run, config = run_of(tmp_path / "run", 3)
    words = ("--dependency=afterok:7", "--nice")
    run.run_json.write_text(dump(with_values(config, sbatch=words)))
    monkeypatch.setattr(evaluate, "convert", lambda *_: tmp_path / "hf")
    _, (recipe, *_) = evaluate._evaluation_of(run, 3, None)
    assert load([Path(recipe)], {}).config.cluster.sbatch == ("--nice",)


def test_a_dry_run_prints_the_job_of_an_evaluation(tmp_path: Path, capsys: Any) -> None:
    words = ["--recipe", "tiny", "--dry-run", "--out", str(tmp_path / "e"), "--hf-checkpoint", "m"]
    assert main(words) == 0
    assert "#SBATCH --job-name=tiny" in capsys.readouterr().out
