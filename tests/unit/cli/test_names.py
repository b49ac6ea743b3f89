"""Names at the command line: recipes, completion in a real bash, the folder of the runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rlpost import __version__
from rlpost.cli.completion import completion_script, flags_of_verb
from rlpost.cli.main import main, verbs
from rlpost.cli.recipes import JOBS, description
from rlpost.cli.runs import RUNS_DIR_VARIABLE
from rlpost.config.flags import fields, first_sentence, flag
from tests.unit.cli.projects import make_project
from tests.unit.observe.report.runs import make_run


def test_recipes_models_and_clusters_are_listed_with_the_first_sentence_of_their_file(capsys):
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for kind, names in found.items():
        assert set(names) == {path.stem for path in (JOBS / kind).glob("*.*")}
        assert all(text.endswith(".") for text in names.values())
    assert main(["recipes", "models"]) == 0
    out = capsys.readouterr().out
    assert "qwen3_4b" in out and "clusters" not in out


def test_a_description_is_the_first_sentence_of_the_first_comment():
    assert description("# One node,\n# no GPU. More.\n\n[cluster]") == "One node, no GPU."
    assert description("[cluster]") == ""
    assert first_sentence("W&B at v1.2 of it. And\n    those.") == "W&B at v1.2 of it."


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlpost {__version__}\n"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # the doctor's flags come from a separate process, which takes a second
    flags = {verb: flags_of_verb(verb) for verb in verbs() if verb != "doctor"}
    path = tmp_path_factory.mktemp("completion") / "rlpost.bash"
    path.write_text(completion_script(flags))
    return path


def completed(script: Path, *words: str, runs: Path) -> list[str]:
    """What bash offers for the last of the words."""
    code = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rlpost; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-c", code, "bash", str(script), "rlpost", *words]
    environ = {"PATH": "/usr/bin:/bin", RUNS_DIR_VARIABLE: str(runs)}
    done = subprocess.run(
        command, env=environ, cwd=script.parent, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_bash_completes_verbs_flags_settings_recipes_profiles_and_runs(script, tmp_path):
    (tmp_path / "runs/tiny-7").mkdir(parents=True)

    def offered(*words: str) -> list[str]:
        return completed(script, *words, runs=tmp_path / "runs")

    assert offered("") == [verb for verb in verbs() if verb != "doctor"]
    assert offered("comp") == ["compare", "completion"]
    assert offered("submit", "qwen3_4b_a") == ["qwen3_4b_async"]
    assert offered("convert", "qwen3_4b_a") == offered("rehearse", "qwen3_4b_a")
    assert offered("rehearse", "qwen3_4b_a") == ["qwen3_4b_async"]
    assert offered("submit", "tiny", "--dry") == ["--dry-run"]
    assert offered("submit", "tiny", "--lr-warmup-f") == ["--lr-warmup-fraction"]
    assert set(map(flag, fields())) < set(offered("check", "tiny", "--"))
    assert offered("check", "tiny", "--cluster", "inf") == ["infiniband"]
    assert offered("status", "ti") == ["tiny-7"]
    assert offered("logs", "--fol") == ["--follow"]
    assert offered("recipes", "m") == ["models"]


def test_verbs_and_submit_use_the_folder_of_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_project(tmp_path / "project"))
    monkeypatch.setenv(RUNS_DIR_VARIABLE, str(tmp_path / "shared"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    make_run(tmp_path / "shared/mine", num_steps=3, preempted_at=())
    assert main(["list"]) == 0
    assert "mine" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["check", "recipe.toml", "--print-config"])
    shown = capsys.readouterr().out
    assert f'runs_dir = "{tmp_path / "shared"}"' in shown and f"${RUNS_DIR_VARIABLE}" in shown
    with pytest.raises(SystemExit):
        main(["check", "recipe.toml", "--runs-dir", "here", "--print-config"])
    assert f'runs_dir = "{tmp_path / "project/here"}"' in capsys.readouterr().out


def test_a_report_is_a_page_a_recipe_and_a_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    run = make_run(tmp_path / "runs/seven-b", num_steps=40, preempted_at=(25,))
    assert main(["report", str(run.root)]) == 0
    text = capsys.readouterr().out
    assert text == (run.report / "report.txt").read_text()
    assert f"report {run.report / 'report.html'}" in text
    assert "reward on aime: 0.120 at step 0 -> " in text and "preempted  reason SIGUSR2" in text
    assert "40 / 40" in (run.report / "report.html").read_text()
    assert "num_rollout = 40" in (run.report / "recipe.toml").read_text()
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.report.glob("re*.[ht]*ml")}
    assert modes == {"report.html": 0o600, "recipe.toml": 0o600}


def test_a_run_without_a_step_has_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    run = make_run(tmp_path / "runs/seven-b", num_steps=1, preempted_at=())
    run.metrics.unlink()
    assert main(["report", str(run.root)]) == 0
    assert (run.report / "report.html").exists()
    assert "report " in capsys.readouterr().out


def test_a_comparison_lies_in_the_first_run_unless_told_otherwise(tmp_path, capsys):
    runs = [make_run(tmp_path / name, num_steps=5, preempted_at=()) for name in ("a", "b")]
    assert main(["compare", *(str(run.root) for run in runs)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["page", str(runs[0].report / "compare.html")]
    elsewhere = ["--runs-dir", str(tmp_path), "--html", str(tmp_path / "out/two.html")]
    assert main(["compare", "a", "b", *elsewhere]) == 0
    assert (tmp_path / "out/two.html").read_text() == (runs[0].report / "compare.html").read_text()
