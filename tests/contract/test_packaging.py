"""Source distribution and wheel.

An installation without the checkout holds all files, submits jobs and can be extended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.examples import install, write_examples
from tests.installed import ROOT, Built, build_wheel, clean_environment
from tests.unit.cli.projects import MODEL, make_project
from tests.unit.test_architecture import HEAVY

SETTINGS = {"pydantic", "yaml", "rich", "submitit"}  # needed by some verbs only


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_wheel(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def programs(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clean_environment(tmp_path_factory.mktemp("login") / "venv", built.wheel)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_of_the_packages_is_in_the_wheel_and_nothing_else_is(built):
    """Built through the source distribution; pages, scripts, recipes, profiles, models included."""
    found = {
        name
        for name in zipfile.ZipFile(built.wheel).namelist()
        if not name.split("/")[0].endswith(".dist-info")
    }
    assert found == built.files


def test_help_loads_nothing_heavy_and_no_settings(programs, tmp_path):
    code = "import sys; from rlpost.cli.main import main; code = main(['--help']); print(*sys.modules); sys.exit(code)"
    loaded = run(programs / "python", "-c", code, cwd=tmp_path).splitlines()[-1].split()
    assert "rlpost.cli.main" in loaded
    assert not (HEAVY | SETTINGS) & set(loaded)


def test_the_programs_are_installed(programs, tmp_path):
    assert "submit" in run(programs / "rlpost", "--help", cwd=tmp_path)
    assert "--dry-run" in run(programs / "rlpost-submit", "--help", cwd=tmp_path)


def test_a_login_node_with_the_wheel_alone_checks_and_renders_a_job(programs, tmp_path):
    """Recipes, models and profiles are known by name.

    The declared requirements are sufficient.
    """
    project = make_project(tmp_path / "project")
    script = run(
        programs / "rlpost",
        "submit",
        "recipe.toml",
        "--cluster",
        "gres",
        "--nodes",
        "1",
        "--dry-run",
        cwd=project,
    )
    assert "--gres=gpu:8" in script
    assert "qwen3_4b" in run(
        programs / "rlpost", "check", "qwen3_4b", "--print-config", cwd=project
    )
    assert "parameters" in run(programs / "rlpost", "check", "recipe.toml", cwd=project)
    assert run(programs / "rlpost", "list", cwd=project).split()[:3] == ["run", "job", "state"]


@pytest.fixture
def rlpost(programs, tmp_path):
    """``rlpost(words)``: the installed program in an empty folder, without RLPOST_ASSETS."""

    def call(words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [programs / "rlpost", *words.split()],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", **environ},
            capture_output=True,
            text=True,
        )

    return call


@pytest.mark.parametrize(
    ("verb", "printed", "noted"),
    [
        ("submit qwen3_4b --dry-run", "slurm.batch run", "export RLPOST_ASSETS=FOLDER"),
        ("submit tiny --dry-run", "slurm.batch run", "not made yet; run: rlpost fetch tiny"),
        ("convert qwen3_4b --dry-run", "slurm.batch convert", "Qwen3-4B is miss"),
        ("plan qwen3_4b --json", '"fits": true', ""),
        ("recipes", "qwen3_4b", ""),
        ("list --json", "[]", ""),
    ],
)
def test_a_verb_needs_no_weights_and_no_folder(rlpost, verb, printed, noted):
    done = rlpost(verb)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout and noted in done.stderr


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("check tiny", "not made yet; run: rlpost fetch tiny"),
        ("check qwen3_4b --assets-dir a", "run: rlpost fetch qwen3_4b --assets-dir"),
        ("check qwen3_4b --assets-dir a", "make it with rlpost convert"),
        ("fetch qwen3_4b --assets-dir a", "pip install 'huggingface_hub"),
        ("fetch tiny", "needs torch and transformers"),
        ("plan tiny", "rlpost fetch"),
        ("rehearse tiny", "docs/install.md"),
    ],
)
def test_an_error_names_the_command_that_provides_what_is_missing(rlpost, verb, said):
    done = rlpost(verb)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_without_the_stack_no_part_of_the_tiny_model_is_made(rlpost, tmp_path):
    done = rlpost("fetch tiny")
    assert done.returncode == 2 and "needs torch and transformers" in done.stderr
    assert not (tmp_path / "assets").exists()


def test_an_installation_knows_the_versions_that_an_image_needs(rlpost):
    """They come from its metadata, written by setuptools; the checkout reads setup.cfg."""
    command = [sys.executable, "-m", "bootstrap.image.doctor", "--requirements", "wandb"]
    ours = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    theirs = rlpost("doctor --image --requirements wandb")
    assert set(map(Requirement, theirs.stdout.splitlines())) == set(
        map(Requirement, ours.splitlines())
    )
    found = rlpost("doctor --image")
    assert found.returncode == 1 and "megatron-core" in found.stdout


def test_a_job_runs_from_the_snapshot_of_an_installation(built, programs, tmp_path):
    """There is no git repository: packages and jobs are copied.

    The agent and the check of an image start from the copy.
    """
    code = (
        "from pathlib import Path; from slurm.snapshot import snapshot_code; from rlpost.cli.submit import PROJECT; "
        "print(snapshot_code(PROJECT, Path('code')).num_files)"
    )
    count = int(run(programs / "python", "-c", code, cwd=tmp_path))
    assert count == len(built.files) + 1  # and METADATA
    snapshot = tmp_path / "code"
    assert "usage" in run(programs / "python", "-m", "bootstrap.agent", "--help", cwd=snapshot)
    listed = [sys.executable, "-S", "-m", "bootstrap.image.doctor", "--requirements"]
    assert "torch==" in run(*listed, cwd=snapshot)


def test_a_family_of_an_installed_package_is_known_on_the_login_node(tmp_path):
    """The family of docs/extending.md.

    It is known to a process that has the package, without further settings, and to no other.
    """
    packages = install(write_examples(tmp_path / "user") / "ernie", tmp_path / "packages")
    project = make_project(tmp_path / "project")
    (project / "model/config.json").write_text(
        json.dumps(MODEL | {"architectures": ["Ernie4_5ForCausalLM"]})
    )

    def check(*path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlpost", "check", "recipe.toml"]
        environ = {**os.environ, "PYTHONPATH": ":".join(map(str, (*path, ROOT)))}
        return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True)

    assert "Ernie4_5ForCausalLM, 22." in check(packages).stdout
    without = check()
    assert without.returncode == 2
    assert "'Ernie4_5ForCausalLM' is not known" in without.stderr
