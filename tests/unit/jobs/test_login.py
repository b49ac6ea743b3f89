"""``./jobs/NAME.sbatch`` on a login node: it checks everything that can be checked there, then submits
itself.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from rlpost.cli.job import job_spec
from rlpost.config.load import JOBS, files_of, load
from slurm.login import image_problem, recipe_files, recipe_text
from slurm.render import render_sbatch
from tests.unit.jobs.assets import make_assets
from tests.unit.slurm.stand_ins import NO_PYXIS, PYXIS, commands

ROOT = JOBS.parent
SBATCH = """[ "$1" = --test-only ] && {{ {answer}; exit {code}; }}
printf '%s\\n' "$RLPOST_HOME" "$@" >"{folder}/submitted"; echo Submitted batch job 7"""

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The project without a virtual environment."""
    home = tmp_path / "home"
    for name in ("slurm", "jobs"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("bootstrap", "common", "rlpost"):
        (home / name).symlink_to(ROOT / name)
    return home


def make_environment(home: Path) -> None:
    python = home / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)


@pytest.fixture
def call(home: Path, tmp_path: Path) -> Call:
    """Call a batch file as a user on a login node does: by a relative path, from another folder."""

    def do(
        name: str,
        *words: str,
        srun: str = NO_PYXIS,
        answer: str = "",
        code: int = 0,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        sbatch = SBATCH.format(answer=answer or ":", code=code, folder=tmp_path)
        path = commands(tmp_path / "bin", srun=srun, sbatch=sbatch)
        script = home.relative_to(tmp_path) / "jobs" / f"{name}.sbatch"
        return subprocess.run(
            [script, *words],
            env={"PATH": path, **environ},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )

    return do


def submitted(tmp_path: Path) -> list[str] | None:
    path = tmp_path / "submitted"
    return path.read_text().splitlines() if path.exists() else None


def test_a_correct_job_is_submitted_with_its_flags(
    call: Call, home: Path, tmp_path: Path, assets
) -> None:
    done = call("qwen3_4b", "--num-rollout", "3", "--save", "a b", RLPOST_ASSETS=str(assets))
    assert done.returncode == 0 and done.stdout == "Submitted batch job 7\n", done
    file = f"{home}/jobs/qwen3_4b.sbatch"
    assert submitted(tmp_path) == [str(home), file, "--num-rollout", "3", "--save", "a b"]
    assert "none: srun has no --container-image and enroot is not on the PATH" in done.stderr
    assert "the job checks the settings" in done.stderr


def test_an_image_that_this_user_cannot_read_is_named(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rl.sqsh"
    path.touch()
    error = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(Path, "open", Mock(side_effect=error))
    assert image_problem(str(path)) == f"image {path}: cannot be read: Permission denied"


def test_a_refusal_of_slurm_is_shown_with_its_message(call: Call, tmp_path: Path, assets) -> None:
    words = "sbatch: error: invalid account or account/partition combination specified"
    done = call("qwen3_4b", RLPOST_ASSETS=str(assets), answer=f"echo '{words}' >&2", code=1)
    assert done.returncode == 78 and words in done.stderr and "SBATCH_ACCOUNT" in done.stderr
    assert submitted(tmp_path) is None


def test_all_missing_variables_are_named_at_once(call: Call, tmp_path: Path) -> None:
    done = call("glm45_355b", "--nodes", "4", srun=PYXIS)
    assert done.returncode == 78 and submitted(tmp_path) is None
    assert "--nodes 4: " in done.stderr and "not set: RLPOST_IMAGE RLPOST_ASSETS;" in done.stderr
    assert "RLPOST_CONTAINER=none" in done.stderr
    wrong = call("glm45_355b", RLPOST_CONTAINER="docker")
    assert wrong.returncode == 78 and "RLPOST_CONTAINER=docker is not a choice" in wrong.stderr


def test_an_image_is_checked_where_its_file_is_visible(call: Call, tmp_path: Path, assets) -> None:
    site = {"srun": PYXIS, "RLPOST_ASSETS": str(assets)}
    missing = call("qwen3_4b", **site, RLPOST_IMAGE=f"{tmp_path}/nowhere.sqsh")
    assert (
        missing.returncode == 78
        and f"image {tmp_path}/nowhere.sqsh: no such file" in missing.stderr
    )
    (tmp_path / "text.sqsh").write_text("<html>404")
    broken = call("qwen3_4b", **site, RLPOST_IMAGE=f"{tmp_path}/text.sqsh")
    assert broken.returncode == 78 and "not a squashfs file" in broken.stderr
    (tmp_path / "image.sqsh").write_text("hsqs")
    for image in (
        f"{tmp_path}/image.sqsh",
        "/on/each/node.sqsh",
        "nvcr.io/nvidia/pytorch:25.01-py3",
    ):
        assert call("qwen3_4b", **site, RLPOST_IMAGE=image).returncode == 0, image


@pytest.mark.parametrize("name", ["qwen3_4b", "convert_qwen3_4b"])
def test_missing_models_are_named_without_a_virtual_environment_too(
    call: Call, name: str, tmp_path
) -> None:
    done = call(name, RLPOST_ASSETS=f"{tmp_path}/none")
    assert done.returncode == 78 and submitted(tmp_path) is None
    assert f"{tmp_path}/none/Qwen3-4B does not exist; rlpost fetch" in done.stderr


def test_files_that_the_base_of_a_recipe_names_are_checked_too() -> None:
    text = recipe_text(JOBS / "recipes/glm46_355b.toml")
    files = {name.partition(" ")[0]: path for name, path in recipe_files(text, []).items()}
    assert files["--hf-checkpoint"] == "$RLPOST_ASSETS/GLM-4.6"
    assert files["--prompt-data"].startswith("$RLPOST_ASSETS/dapo-math-17k/")


def test_a_file_that_a_flag_replaces_is_not_required(call: Call, tmp_path: Path, assets) -> None:
    done = call("qwen3_4b", "--prompt-data", "mine.jsonl", RLPOST_ASSETS=f"{tmp_path}/none")
    assert "--hf-checkpoint" in done.stderr and "--prompt-data" not in done.stderr


@pytest.mark.slow
def test_with_a_virtual_environment_the_settings_are_checked_in_full(
    call: Call, home: Path, tmp_path: Path, assets
) -> None:
    make_environment(home)
    wrong = call("qwen3_4b", "--tensor-model-parallel-size", "3", RLPOST_ASSETS=str(assets))
    assert wrong.returncode == 78 and "--tensor-model-parallel-size 3" in wrong.stderr, wrong
    assert submitted(tmp_path) is None
    # A container sees only the assets and the project of this machine.
    (tmp_path / "image.sqsh").write_text("hsqs")
    site = {"srun": PYXIS, "RLPOST_ASSETS": str(assets), "RLPOST_IMAGE": f"{tmp_path}/image.sqsh"}
    data = Path("dapo-math-17k/dapo-math-17k.jsonl")
    for folder, code in ((home / "data", 0), (tmp_path / "data", 78)):
        folder.mkdir()
        shutil.copy(assets / data, folder / "p.jsonl")
        done = call("qwen3_4b", "--prompt-data", f"{folder}/p.jsonl", **site)
        assert done.returncode == code, done


def test_a_host_without_slurm_names_the_missing_command(home: Path, tmp_path: Path, assets) -> None:
    environ = {"PATH": str(tmp_path / "bin"), "RLPOST_ASSETS": str(assets)}
    commands(tmp_path / "bin", python3=f'exec {sys.executable} "$@"')
    for name in ("bash", "dirname", "date", "grep", "hostname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    done = subprocess.run(
        [home / "jobs/qwen3_4b.sbatch"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 78 and "sbatch is not on the PATH of this host" in done.stderr, done


def test_a_profile_with_pyxis_is_refused_on_a_cluster_without_it(
    call: Call, home: Path, assets
) -> None:
    profile = home / "pyxis.toml"
    profile.write_text("[cluster]\ncontainer = 'pyxis'\ncontainer_image = '/nowhere/i.sqsh'\n")
    config = load(files_of(JOBS / "recipes/qwen3_4b.toml", str(profile)), {}).config
    spec = replace(job_spec(config, driver_args=("jobs/recipes/qwen3_4b.toml",)), python=None)
    (home / "jobs/qwen3_4b.sbatch").write_text(render_sbatch(spec))
    refused = call("qwen3_4b", RLPOST_ASSETS=str(assets))
    assert refused.returncode == 78 and "this cluster has no pyxis; choose enroot" in refused.stderr
    assert call("qwen3_4b", RLPOST_ASSETS=str(assets), srun=PYXIS).returncode == 0
