"""Completion in a real bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlpost.cli.main import verbs
from rlpost.cli.runs import RUNS_DIR_VARIABLE
from rlpost.config.flags import fields, flag
from rlpost.extensions.completing.completion_verb import completion_script, flags_of_verb


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
