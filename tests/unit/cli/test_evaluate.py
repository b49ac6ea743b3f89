"""``rlpost evaluate``: what is submitted, and which weights a step of a run has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.run_folder import RunFolder, create_run_folder
from common.run_identity import settle_identity
from rlpost.cli.outcome import conclude, summary
from rlpost.config.checks.export_folder import MARKER, Marker, mark, name_weights
from rlpost.config.load import dump, files_of, load
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.durable.commit import begin, checkpoint_name, commit
from rlpost.errors import ConfigError
from rlpost.extensions.evaluating import evaluate_verb as evaluate
from rlpost.extensions.evaluating.evaluate_verb import (
    MAKER,
    conversion_of,
    convert,
    main,
    remove_leftovers,
    weights_of,
)
from rlpost.extensions.watching.list_verb import COLUMNS
from rlpost.extensions.watching.run_status import statuses
from rlpost.observe.writer import MetricsWriter
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


def exported_by(run: RunFolder, folder: Path, step: int, attempt: str = "1") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    identity = settle_identity(run.root)
    mark(folder, Marker(identity.id, identity.label, step, attempt))


def test_the_weights_of_a_step_are_exported_ones_or_a_committed_checkpoint(tmp_path: Path) -> None:
    template = str(tmp_path / "hf-{step}")
    run, config = run_of(tmp_path / "run", 10, 20, save_hf=template)
    begin(run.checkpoints, 30)  # not committed
    assert weights_of(run, config, None) == (20, run.checkpoints / checkpoint_name(20))
    assert weights_of(run, config, 10) == (10, run.checkpoints / checkpoint_name(10))
    exported_by(run, tmp_path / "hf-15", 15)
    assert weights_of(run, config, 15) == (15, tmp_path / "hf-15")
    for step in (30, 5):
        with pytest.raises(ConfigError, match=f"--step {step}: .*no checkpoint of it.*: 10, 20"):
            weights_of(run, config, step)
    empty, config = run_of(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"--step \(newest\): .*checkpoints of the steps: none"):
        weights_of(empty, config, None)


def test_a_folder_that_each_export_replaces_is_not_taken_for_that_of_a_step(tmp_path: Path) -> None:
    run, config = run_of(tmp_path / "run", 10, save_hf=str(tmp_path / "latest"))
    exported_by(run, tmp_path / "latest", 10)
    assert weights_of(run, config, 10)[1] == run.checkpoints / checkpoint_name(10)


def test_weights_that_another_run_exported_are_never_those_of_a_step(tmp_path: Path) -> None:
    """Another run, a copy of the run, the same step before it was trained again, no export."""
    template = str(tmp_path / "hf-{step}")
    run, config = run_of(tmp_path / "run", 10, save_hf=template)
    exported = tmp_path / "hf-10"
    exported_by(run, exported, 10)
    assert weights_of(run, config, 10)[1] == exported
    other, _ = run_of(tmp_path / "other", 10, save_hf=template)
    copy = RunFolder(shutil.copytree(run.root, tmp_path / "copy"))
    for each in (other, copy):
        assert weights_of(each, config, 10)[1] == each.checkpoints / checkpoint_name(10)
        with pytest.raises(ConfigError, match=r"save-hf no folder \(.*hf-11 has no config.json\)"):
            weights_of(each, config, 11)
    exported_by(other, tmp_path / "hf-12", 12)
    with pytest.raises(ConfigError, match=r"save-hf no folder \(.*hf-12 is of another run\)"):
        weights_of(run, config, 12)
    for attempt in ("1", "2"):  # the second starts from step 5, and saves step 10 again
        run.ledger.append("started", attempt=attempt, step=0 if attempt == "1" else 5)
        run.ledger.append("committed", step=10)
        expected = exported if attempt == "1" else run.checkpoints / checkpoint_name(10)
        assert weights_of(run, config, 10)[1] == expected
    exported_by(run, exported, 10, attempt="2")
    assert weights_of(run, config, 10)[1] == exported
    (exported / MARKER).unlink()
    assert weights_of(run, config, 10)[1] == run.checkpoints / checkpoint_name(10)


def test_a_conversion_is_used_again_only_for_what_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.extensions.evaluating.evaluate_verb.subprocess.run", converted)
    model, out = tmp_path / "model", tmp_path / "evals"
    for folder in (model, out):
        folder.mkdir()
    (model / "tokenizer.json").write_text("{}")
    run, _ = run_of(tmp_path / "run", 10)
    other, _ = run_of(tmp_path / "other", 10)

    def conversion(run: RunFolder) -> Path:
        return conversion_of(run, 10, run.checkpoints / checkpoint_name(10), str(model), out)

    first = conversion(run)
    assert name_weights(first) == f"{run.root.name} step 10"
    assert conversion(run) == first and first.name.startswith("hf_0000010-")
    assert conversion(other) != first, "another run"
    (model / "tokenizer.json").write_text("[]")
    second = conversion(run)
    assert second != first, "another model under the same path"
    saved = run.checkpoints / checkpoint_name(10)
    shutil.rmtree(saved)
    writing = begin(run.checkpoints, 10)
    (writing / "weights").write_text("trained again")
    commit(writing)
    third = conversion(run)
    assert third not in (first, second)
    (third / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"hf_0000010-.*: lacks some of its files; remove it"):
        conversion(run)
    shutil.rmtree(third)
    shutil.copytree(second, third)
    with pytest.raises(ConfigError, match="was not converted from this checkpoint"):
        conversion(run)
    monkeypatch.setattr(
        "rlpost.extensions.evaluating.evaluate_verb.os.geteuid", lambda: os.getuid() + 1
    )
    with pytest.raises(ConfigError, match=f"its owner is user {os.getuid()}"):
        conversion(run)


def test_adapters_are_refused_with_the_remedy(tmp_path: Path) -> None:
    run, config = run_of(tmp_path / "run", 10)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"lora_rank": 8})})
    with pytest.raises(
        ConfigError, match=r"has adapters.* --save-hf exported with --lora-export merged"
    ):
        weights_of(run, config, 10)


def test_a_conversion_that_fails_leaves_no_folder(tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(ConfigError, match=r"was not converted .*exit code 1"):
        convert(tmp_path / "none", str(tmp_path / "no-model"), tmp_path / "hf", MADE)
    assert list(tmp_path.iterdir()) == []


MADE = Marker("0123", "run-0123", 10, source={"checkpoint": "c", "model": "m"})


def converted(command: list[str], env: object) -> SimpleNamespace:
    folder = Path(command[command.index("--output-dir") + 1])
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return SimpleNamespace(returncode=0)


PROGRAM = """
import sys, time
from pathlib import Path
from rlpost.extensions.evaluating import evaluate_verb as evaluate
def run(command, env):
    Path(command[command.index("--output-dir") + 1]).mkdir()
    time.sleep(60)
evaluate.subprocess.run = run
evaluate.convert(Path("x"), "m", Path(sys.argv[1]), evaluate.Marker("", "", 10))
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

    synced: list[str] = []
    monkeypatch.setattr("rlpost.extensions.evaluating.evaluate_verb.subprocess.run", converted)
    monkeypatch.setattr(
        "rlpost.extensions.evaluating.evaluate_verb.sync", lambda path: synced.append(path.name)
    )
    assert convert(tmp_path / "x", "m", target, MADE) == target
    assert sorted(killed.iterdir()) == sorted([*others, target])
    assert sorted(path.name for path in target.iterdir()) == [MARKER, "config.json"]
    assert sorted(synced[:2]) == [MARKER, "config.json"]
    assert synced[2:] == ["hf", "run"], "files before their folder, the rename last"


def test_an_interrupted_conversion_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(command: list[str], env: object) -> None:
        Path(command[command.index("--output-dir") + 1]).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("rlpost.extensions.evaluating.evaluate_verb.subprocess.run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "x", "m", tmp_path / "hf", MADE)
    assert list(tmp_path.iterdir()) == []


def test_engines_beside_training_are_not_started_without_a_trainer(tmp_path: Path) -> None:
    recipe = tmp_path / "beside.toml"
    recipe.write_text(
        'base = "tiny"\n[eval]\neval_engines = "evaluator"\n'
        "[engines.evaluator]\nfollows_policy = true\ngpus = 3\n"
        '[engines.judge]\nmodel = "assets/tiny"\n'
    )
    files = files_of(recipe)
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


def test_an_evaluation_has_all_settings_of_the_run_but_the_job_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That job is over: Slurm may refuse a dependency on one that it has forgotten."""
    run, config = run_of(tmp_path / "run", 3)
    words = ("--dependency=afterok:7", "--nice")
    config = with_values(config, environment={"A_TOKEN": "a"}, rm_url="http://u:p@host/x")
    older = json.loads(dump(with_values(config, sbatch=words)))
    older["distillation"] |= {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "/t"}
    run.run_json.write_text(json.dumps(older))
    monkeypatch.setattr(evaluate, "convert", lambda *_: tmp_path / "hf")
    _, (recipe, *_) = evaluate._evaluation_of(run, 3, None)
    assert load([Path(recipe)], {}).config == with_values(config, sbatch=("--nice",))
    assert Path(recipe).stat().st_mode & 0o077 == 0, "it holds the run's secrets"


def test_a_dry_run_prints_the_job_of_an_evaluation(tmp_path: Path, capsys: Any) -> None:
    words = ["--recipe", "tiny", "--dry-run", "--out", str(tmp_path / "e"), "--hf-checkpoint", "m"]
    assert main([*words, "--sglang-load-format", "dummy"]) == 0
    assert "#SBATCH --job-name=tiny" in capsys.readouterr().out


def test_an_evaluation_has_no_steps_no_goodput_and_no_summary_before_its_table(tmp_path, capsys):
    settings = {"debug": {"debug_eval_only": True}, "rollout": {"num_rollout": 60}}
    run = create_run_folder(tmp_path / "run", json.dumps(settings))
    run.ledger.append("submitted", job_id="local-1", nodes=1)
    MetricsWriter(run.metrics).write(0, {"eval/heldout/reward_mean": 0.5})
    (run.new_attempt() / "verdict").write_text("done\n")
    assert conclude(run) == 0 and capsys.readouterr().out == ""
    assert summary(run) == ["reward on heldout: 0.500 at step 0", f"metrics {run.metrics}"]
    (status,) = statuses([run])
    assert status.num_steps is None and status.goodput is None and status.num_attempts == 0
    step = next(column for column in COLUMNS if column.name == "step")
    assert step.value(replace(status, num_attempts=1)) == ""
