"""jobs/convert_*.sbatch: a script for each converted model that a recipe names, rendered from the
same files as its run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.cli.main import main
from rlpost.config.checks.missing import missing_problems
from rlpost.config.load import JOBS, files_of, load
from slurm.container import Container
from slurm.render import render_conversion, render_look
from tests.settings import a_job
from tests.unit.jobs.assets import make_assets

SCRIPTS = sorted(JOBS.glob("convert_*.sbatch"))
RECIPES = sorted(path for path in (JOBS / "recipes").glob("*.toml") if path.stem != "tiny")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_start_weights_of_a_recipe_are_made_by_one_script(recipe, monkeypatch):
    """From the BF16 weights in the folder of the same name, not from the FP8 weights of engines."""
    monkeypatch.delenv("RLPOST_ASSETS", raising=False)
    wanted = load(files_of(recipe), {}).config.checkpoint.ref_load
    if wanted is None:
        return  # it starts from its model folder
    (script,) = (
        text for text in (path.read_text() for path in SCRIPTS) if f"'--save={wanted}'" in text
    )
    assert (
        f"--hf-checkpoint '{wanted.removesuffix('_torch_dist')}' " in script and "FP8" not in script
    )


def test_the_largest_conversions_use_two_nodes_and_the_others_one():
    nodes = {path.stem: int(re.search(r"--nodes=(\d+)", path.read_text())[1]) for path in SCRIPTS}
    assert nodes == {
        "convert_glm45_355b": 2,
        "convert_glm46_355b": 2,
        "convert_glm47_355b": 2,
        "convert_qwen3_235b_a22b": 2,
        "convert_glm_z1_9b": 1,
        "convert_qwen3_30b_a3b": 1,
        "convert_qwen3_4b": 1,
    }


def run(script: str, tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script with stand-ins for srun and scontrol: srun records its arguments and creates the
    output folder of the tool.
    """
    commands = tmp_path / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "scontrol").write_text("#!/bin/bash\nprintf 'n01\\nn02\\n'\n")
    written = 'for save; do :; done; mkdir -p "$save"; exit "${CODE:-0}"'
    has_pyxis = '[ "$1" = --help ] && echo --container-image && exit'
    (commands / "enroot").write_text("#!/bin/bash\n")
    (commands / "srun").write_text(
        f'#!/bin/bash\n{has_pyxis}\nprintf "%s\\n" "$@" >>"$WORDS"\n{written}\n'
    )
    for path in commands.iterdir():
        path.chmod(0o755)
    for name in ("slurm", "common"):
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(JOBS.parent / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.touch(0o755)
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[01-02]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    given |= {"PATH": f"{commands}:{os.environ['PATH']}", "WORDS": str(tmp_path / "words")}
    return subprocess.run(
        ["bash"], input=script, env=given | environ, capture_output=True, text=True
    )


def test_a_job_without_its_sites_variables_names_them_and_is_not_requeued(tmp_path):
    done = run((JOBS / "convert_glm45_355b.sbatch").read_text(), tmp_path)
    assert done.returncode == 78 and "not set: RLPOST_IMAGE RLPOST_ASSETS;" in done.stdout
    assert not (tmp_path / "words").exists()


def test_the_folder_is_renamed_when_everything_is_written(tmp_path):
    script = render_conversion(
        a_job(nodes=2, num_gpus_per_node=4), str(tmp_path / "x y_torch_dist")
    )
    failed = run(script, tmp_path, CODE="3")
    assert failed.returncode == 1 and "not converted (exit 3)" in failed.stdout
    assert not list(tmp_path.glob("x y_torch_dist*"))
    (tmp_path / "words").unlink()
    for name in ("x y_torch_dist.converting", "x y_torch_dist.converting-6"):
        (tmp_path / name).mkdir()  # another user's, or another job writes it now
    done = run(script, tmp_path)
    assert done.returncode == 0 and (tmp_path / "x y_torch_dist").is_dir()
    left = sorted(path.name for path in tmp_path.glob("*.converting*"))
    assert left == ["x y_torch_dist.converting", "x y_torch_dist.converting-6"]
    words = (tmp_path / "words").read_text().splitlines()
    at = words.index("bash")
    assert (
        words[at + 2 : at + 5] == [f"{tmp_path}/.venv/bin/python", "4", "n01"]
        and 20_000 <= int(words[at + 5]) < 30_000
    )
    (tmp_path / "words").unlink()
    assert run(script, tmp_path).returncode == 0 and not (tmp_path / "words").exists()


HOSTILE = a_job(
    driver_args=("--hf-checkpoint", "a'; touch x", "$(touch x)", "$RLPOST_ASSETS; touch x"),
    environment=(("MARK", "$(touch x)"),),
)


@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        (None, ""),
        ("pyxis", "pyxis"),
        ("enroot", ""),
        ("auto", "pyxis"),
        ("auto", "enroot"),
        ("auto", "none"),
    ],
)
def test_arguments_reach_the_tool_unchanged_and_are_not_executed(backend, chosen, tmp_path):
    container = Container(backend, "/i.sqsh", ("/models",)) if backend else None
    for script in (
        render_conversion(replace(HOSTILE, container=container), f"{tmp_path}/$(touch x)"),
        render_look(replace(HOSTILE, container=container)),
    ):
        run(script, tmp_path, RLPOST_ASSETS="/a", RLPOST_CONTAINER=chosen)
        words = (tmp_path / "words").read_text().splitlines()
        (tmp_path / "words").unlink()
        assert [word for word in HOSTILE.driver_args if word not in words] == []
        assert not (tmp_path / "x").exists()
        assert any(word.startswith("--container-image") for word in words) == (chosen == "pyxis")


def test_a_conversion_is_submitted_with_a_copy_of_the_code(tmp_path, monkeypatch, capsys):
    """``rlpost convert``: the same job as jobs/convert_NAME.sbatch, in a separate folder, submitted
    from any folder. The profile's --segment divides the nodes of a run, not its one node.
    """
    commands = tmp_path / "bin"
    commands.mkdir()
    answers = {"scontrol": "exit 0", "srun": "exit 1", "sbatch": "echo 7"}
    for name, text in answers.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setenv("RLPOST_ASSETS", str(make_assets(tmp_path / "assets")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlpost.cli.submit.PROJECT", make_code(tmp_path / "project"))
    (tmp_path / "racks.toml").write_text("[cluster]\nsegment = 2\n")
    words = ["--partition", "low", "--cluster", "racks.toml"]
    assert main(["convert", "qwen3_30b_a3b", *words]) == 0
    assert "submitted 7" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").glob("convert_qwen3_30b_a3b-*")
    script = (folder / "job.sbatch").read_text()
    assert (folder / "code/rlpost/__init__.py").is_file()
    assert f"home={folder}/code\n" in script and "--partition=low" in script
    assert "--segment" not in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "--nodes=1 " in script and "--time=04:00:00" in script
    source = tmp_path / "assets/Qwen3-30B-A3B"
    words = shlex.split(script.replace("\\\n", " "))
    assert words[words.index("--hf-checkpoint") + 1] == str(source) and "--model" not in words
    assert f"--save={source}_torch_dist" in script


@pytest.mark.parametrize("recipe", ["qwen3_4b", "qwen3_4b_fp8"])
def test_a_conversion_to_fp8_writes_the_folder_of_the_engines(
    recipe, tmp_path, monkeypatch, capsys
):
    """Beside the folder in bfloat16, with the rule of scales of the recipe's GPUs."""
    monkeypatch.setenv("RLPOST_ASSETS", str(make_assets(tmp_path / "assets")))
    assert main(["convert", recipe, "--to", "fp8", "--dry-run", "--gpu-type", "b200"]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    source = str(tmp_path / "assets/Qwen3-4B")
    assert f"--save={source}-FP8" in words and f"--reads={source}" in words
    tool = words[words.index("to-fp8") :]
    assert tool[tool.index("--hf-checkpoint") + 1] == source
    assert tool[tool.index("--gpu-type") + 1] == "b200"
    assert "--job-name=convert_qwen3_4b_fp8" in words


def test_a_folder_that_is_not_converted_yet_is_named_with_the_command(tmp_path, monkeypatch):
    """Only where the recipe does not download it, as Qwen3-4B-FP8."""
    monkeypatch.setenv("RLPOST_ASSETS", str(tmp_path))
    for name, count in (("glm45_355b_fp8", 1), ("qwen3_4b_fp8", 0)):
        config = load(files_of(JOBS / f"recipes/{name}.toml"), {}).config
        lines = missing_problems(config, name)
        assert sum(f"rlpost convert {name} --to fp8" in line for line in lines) == count


def make_code(folder: Path) -> Path:
    """Create a small project, which is copied fast; return its folder."""
    (folder / "rlpost").mkdir(parents=True)
    (folder / "rlpost/__init__.py").touch()
    return folder


def test_a_conversion_needs_its_weights_and_a_folder_to_write(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLPOST_ASSETS", str(tmp_path))
    assert main(["convert", "qwen3_4b"]) == 2
    assert "rlpost fetch qwen3_4b" in capsys.readouterr().err
    assert main(["convert", "tiny"]) == 2
    assert "give --ref-load FOLDER_torch_dist" in capsys.readouterr().err
