"""``make jobs`` without the training stack: pydantic is the only package that it needs."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Renders every job while only the standard library, pydantic and its requirements can be imported.
LIGHT = """
import runpy, sys
ALLOWED = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
OURS = {"rlpost", "slurm", "bootstrap", "common", "tools", "__main__"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in ALLOWED | OURS or top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if not known:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
sys.meta_path.insert(0, Refuse())
for name in ("torch", "ray", "sglang", "megatron", "transformers", "submitit"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can be imported")
sys.argv = ["make_jobs.py", "--check"]
runpy.run_path("tools/make_jobs.py", run_name="__main__")
"""


def test_every_job_is_rendered_without_the_training_stack() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_make_jobs_installs_no_training_stack() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    output = subprocess.run(
        ["make", "-n", "jobs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m tools.make_jobs" in output and "install.sh" not in output


def test_make_jobs_finds_the_project_where_only_pydantic_is_installed(tmp_path: Path) -> None:
    """Without site-packages (-S) there is no editable install, as in ``.venv-jobs``."""
    for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection"):
        package = Path(importlib.import_module(name).__file__).parent
        (tmp_path / name).symlink_to(package)
    module = importlib.import_module("typing_extensions").__file__
    (tmp_path / "typing_extensions.py").symlink_to(module)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tools.make_jobs", "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Python creates environments with a pip that only records its arguments."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/settings_python.sh", tmp_path / "tools")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    inner = 'case $* in *pip*) echo "$*" >>pip.log; touch has-pydantic ;; *) [ -e has-pydantic ] ;; esac'
    (tmp_path / "inner").write_text(f"#!/bin/bash\n{inner}\n")
    (tmp_path / "inner").chmod(0o755)
    python = 'case $* in *venv*) mkdir -p "$3/bin"; cp inner "$3/bin/python" ;; esac'
    (tmp_path / "python").write_text(f"#!/bin/bash\n{python}\n")
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def settings_python(checkout: Path) -> str:
    done = subprocess.run(
        [checkout / "tools/settings_python.sh"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(checkout / "python")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_small_environment_is_created_once(checkout: Path) -> None:
    assert [settings_python(checkout) for _ in range(2)] == [".venv-jobs/bin/python"] * 2
    (line,) = (checkout / "pip.log").read_text().splitlines()
    assert line.endswith("install -qq pydantic>=2.7")


def test_an_existing_environment_is_used(checkout: Path) -> None:
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/bash\n")
    python.chmod(0o755)
    assert (
        settings_python(checkout) == ".venv/bin/python" and not (checkout / ".venv-jobs").exists()
    )
