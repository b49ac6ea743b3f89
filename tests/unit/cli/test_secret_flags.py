"""A key on a command line is out of it before anybody can look, and in no text that a command
prints.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.cli.secret_file import take_keys
from rlpost.cli.submit import main
from rlpost.errors import ConfigError
from tests.unit.cli.projects import make_project

ROOT = Path(__file__).parents[3]
KEY = "k3y" * 13


@pytest.mark.parametrize("given", [["--wandb-key", KEY], [f"--wandb-key={KEY}"]])
def test_the_key_goes_from_the_words_into_the_environment(given):
    environ = {}
    assert take_keys(["a.toml", *given, "--nodes", "2"], environ) == ["a.toml", "--nodes", "2"]
    assert environ == {"WANDB_API_KEY": KEY}


@pytest.mark.parametrize(
    "given", [["--wandb-key"], ["--wandb-key", "--nodes", "2"], ["--wandb-key="]]
)
def test_a_flag_without_its_key_is_refused(given):
    with pytest.raises(ConfigError, match="the key is missing"):
        take_keys(given, {})


@pytest.mark.slow
@pytest.mark.parametrize("module", [["rlpost.submit"], ["rlpost", "check"], ["rlpost.train"]])
def test_the_key_is_shown_as_stars_and_in_no_process_list(tmp_path, module):
    """The process reads its own command line from /proc at its end, as anybody else could."""
    make_project(tmp_path)
    spy = "import atexit, pathlib; atexit.register(lambda: print(pathlib.Path('/proc/self/cmdline').read_bytes()))"
    (tmp_path / "sitecustomize.py").write_text(spy)
    words = ["recipe.toml", "--wandb-key", KEY, "--print-config", "--use-wandb"]
    argv = [sys.executable, "-m", *module, *words]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "# wandb_key = ***" in done.stdout and "--print-config" in done.stdout
    assert KEY not in done.stdout + done.stderr


def test_a_dry_run_s_script_holds_no_key(tmp_path, monkeypatch, capsys):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "other")  # is set by the command; so the test takes it back
    assert main(["recipe.toml", "--dry-run", "--use-wandb", "--wandb-key", KEY]) == 0
    assert os.environ["WANDB_API_KEY"] == KEY
    assert KEY not in capsys.readouterr().out


def test_online_without_a_key_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["recipe.toml", "--local", "--use-wandb"]) == 2
    assert "--wandb-key" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
