"""Names at the command line: recipes, the folder of the runs."""

from __future__ import annotations

import json

import pytest

from rlpost import __version__
from rlpost.cli.main import main
from rlpost.cli.recipes import JOBS, description
from rlpost.cli.runs import RUNS_DIR_VARIABLE
from rlpost.config.flags import first_sentence
from tests.unit.cli.projects import make_project
from tests.unit.watching.report.runs import make_run


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
