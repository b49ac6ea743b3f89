"""rlpost submit and a batch file of jobs/ choose the same container in the same environment, by the
same profile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from common.run_folder import create_run_folder
from rlpost.cli.check import main as check_main
from rlpost.cli.job import container_of_attempt
from rlpost.cli.submit import main
from rlpost.config.load import JOBS, dump, load
from rlpost.errors import ConfigError
from rlpost.extensions.attach.attach_verbs import _inside
from tests.unit.cli.projects import make_project
from tests.unit.jobs.assets import make_assets
from tests.unit.slurm.stand_ins import NO_PYXIS, PYXIS, commands

RECIPE = "jobs/recipes/qwen3_4b.toml"
IN_PYXIS = ("--container", "pyxis", "--container-image", "/i.sqsh", "--container-mounts")
# What a script's step begins with, instead of the step.
SRUN = """{help}
[ "$1" = --help ] || {{ printf '%s\\n' "$@" >>"{folder}/words"; exit 1; }}"""
QUIET = {
    "squeue": "case $* in *%T*) echo COMPLETING ;; esac",
    "scontrol": "exit 0",
    "sbatch": "echo 7",
    "sleep": "exec /bin/sleep 0.1",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster, models and an image."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "RLPOST_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLPOST_ASSETS", str(make_assets(tmp_path / "assets")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "rlpost.cli.submit.snapshot_code", lambda project, code, environ: code.symlink_to(project)
    )
    (tmp_path / "image.sqsh").write_text("hsqs")
    return tmp_path


def has(site: Path, monkeypatch: pytest.MonkeyPatch, *, pyxis: bool, enroot: bool = False) -> None:
    folder = site / f"bin-{pyxis}-{enroot}"
    srun = SRUN.format(help=PYXIS if pyxis else NO_PYXIS, folder=site)
    monkeypatch.setenv(
        "PATH", commands(folder, **QUIET, srun=srun, **({"enroot": ""} if enroot else {}))
    )


def step_of(script: Path, site: Path) -> tuple[str, str]:
    """The container in which a script starts its step, and what it said of it."""
    environ = {
        **os.environ,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_SUBMIT_DIR": str(JOBS.parent),
    }
    environ |= {"RLPOST_RUN_FOLDER": str(site / "run-of-the-file"), "RLPOST_PYTHON": "/usr/bin/env"}
    (site / "words").unlink(missing_ok=True)
    done = subprocess.run(["bash", script], env=environ, capture_output=True, text=True, timeout=20)
    if not (site / "words").exists():
        return f"exit {done.returncode}", done.stdout
    words = (site / "words").read_text()
    kind = (
        "pyxis" if "--container-image=" in words else "enroot" if "enroot.py" in words else "none"
    )
    return kind, done.stdout


CHOICES = [
    ({"pyxis": True}, "", "pyxis"),
    ({"pyxis": True, "enroot": True}, "", "pyxis"),
    ({"pyxis": False, "enroot": True}, "", "enroot"),
    ({"pyxis": False}, "", "none"),
    ({"pyxis": True}, "none", "none"),
    ({"pyxis": True, "enroot": True}, "enroot", "enroot"),
]


@pytest.mark.parametrize(("cluster", "variable", "chosen"), CHOICES)
def test_both_ways_choose_alike(cluster, variable, chosen, site, monkeypatch, capsys) -> None:
    has(site, monkeypatch, **cluster)
    monkeypatch.setenv("RLPOST_IMAGE", str(site / "image.sqsh"))
    if variable:
        monkeypatch.setenv("RLPOST_CONTAINER", variable)
    assert main([str(JOBS.parent / RECIPE), "--run-folder", "run"]) == 0, capsys.readouterr()
    assert step_of(JOBS / "qwen3_4b.sbatch", site)[0] == chosen
    assert step_of(site / "run/job.sbatch", site)[0] == chosen
    noted = [path.read_text().strip() for path in site.glob("run*/attempts/latest/container")]
    assert set(noted) == {chosen}


def test_no_image_ends_both_at_once_with_both_remedies(site, monkeypatch, capsys) -> None:
    has(site, monkeypatch, pyxis=True)
    assert main([str(JOBS.parent / RECIPE), "--run-folder", "run"]) == 2
    refused = capsys.readouterr().err
    ended, said = step_of(JOBS / "qwen3_4b.sbatch", site)
    assert ended == "exit 78" and not (site / "run").exists()
    for message in (refused, said):
        assert "export RLPOST_IMAGE=" in message and "RLPOST_CONTAINER=none" in message
    monkeypatch.setenv("RLPOST_CONTAINER", "none")
    assert main([str(JOBS.parent / RECIPE), "--run-folder", "run"]) == 0


@pytest.mark.parametrize("backend", ["pyxis", "enroot"])
def test_a_name_in_a_registry_is_imported_once_into_the_cache(backend, site, monkeypatch) -> None:
    """Not by every node for itself, and not once more by the next job."""
    has(site, monkeypatch, pyxis=backend == "pyxis")
    folder = Path(os.environ["PATH"].partition(os.pathsep)[0])
    enroot = f'echo "$*" >>"{site}/imports"; '
    enroot += 'while [ "$1" != --output ]; do shift; done; echo hsqs >"$2"'
    commands(folder, srun=(folder / "srun").read_text().partition("\n")[2], enroot=enroot)
    monkeypatch.setenv("RLPOST_IMAGE", "nvcr.io/nvidia/pytorch:25.01-py3")
    monkeypatch.setenv("RLPOST_IMAGE_CACHE", str(site / "cache"))
    for _ in range(2):
        assert step_of(JOBS / "qwen3_4b.sbatch", site)[0] == backend
        assert re.search(rf"{site}/cache/sha256-[0-9a-f]+\.sqsh", (site / "words").read_text())
    (line,) = (site / "imports").read_text().splitlines()
    assert line.endswith("-- docker://nvcr.io#nvidia/pytorch:25.01-py3")


def test_a_profile_with_pyxis_is_refused_where_there_is_none(site, monkeypatch, capsys) -> None:
    has(site, monkeypatch, pyxis=False)
    make_project(site)
    words = [*IN_PYXIS, str(site)]
    assert main(["recipe.toml", *words, "--run-folder", "run"]) == 2
    assert "this cluster has no pyxis; choose enroot" in capsys.readouterr().err
    assert not (site / "run").exists()
    assert check_main(["recipe.toml"]) == 0
    with pytest.raises(ConfigError, match="this cluster has no pyxis"):
        check_main(["recipe.toml", *words])
    has(site, monkeypatch, pyxis=True)
    assert main(["recipe.toml", *words, "--run-folder", "run"]) == 0


def test_a_job_of_such_a_profile_ends_before_its_first_step(site, monkeypatch) -> None:
    make_project(site)
    has(site, monkeypatch, pyxis=True)
    assert main(["recipe.toml", *IN_PYXIS, str(site), "--run-folder", "run"]) == 0
    has(site, monkeypatch, pyxis=False)
    ended, said = step_of(site / "run/job.sbatch", site)
    assert ended == "exit 78" and "this cluster has no pyxis" in said
    assert not list((site / "run").glob("attempts/*"))


def test_without_slurm_auto_is_no_container_and_another_is_refused_before_anything_is_made(
    site, monkeypatch, capsys
) -> None:
    make_project(site)
    has(site, monkeypatch, pyxis=True)
    assert main(["recipe.toml", "--local", "--container", "pyxis", "--run-folder", "run"]) == 2
    assert "--container none" in capsys.readouterr().err and not (site / "run").exists()
    words = ["--local", "--container", "auto", "--run-folder", "run", "--no-wait"]
    assert main(["recipe.toml", *words]) == 0
    assert json.loads((site / "run/run.json").read_text())["cluster"]["container"] == "none"


@pytest.mark.parametrize("chosen", ["pyxis", "enroot", "none"])
def test_exec_and_attach_go_where_the_attempt_went(chosen, site) -> None:
    config = load([], {"cluster": {"container": "auto"}}).config
    run = create_run_folder(site / "run", dump(config))
    attempt = run.new_attempt()
    (attempt / "container").write_text(chosen + "\n")
    container = container_of_attempt(config.cluster, attempt)
    assert (container.backend if container else "none") == chosen
    if chosen == "none":
        run.code.mkdir(exist_ok=True)
        (run.attempts / "latest").unlink(missing_ok=True)
        (run.attempts / "latest").symlink_to(attempt.name)
        assert _inside(run, "7").container is None
