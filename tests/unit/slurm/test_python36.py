"""What batch hosts and nodes run outside a container needs no more than Python 3.6, that of RHEL 8."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STARTS = ("slurm/enroot.py", "slurm/evidence.py", "slurm/image.py", "slurm/supervise.py")
OURS = ("common", "slurm", "bootstrap", "rlpost")


def module_file(name: str) -> Path | None:
    """The file of a module or package of the project; None for a name inside a module."""
    path = ROOT.joinpath(*name.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def imported(path: Path) -> set[Path]:
    """Files of the project that a module imports, with the packages around them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    ours = [name.split(".") for name in names if name.split(".")[0] in OURS]
    around = {".".join(parts[:count]) for parts in ours for count in range(1, len(parts) + 1)}
    return {file for name in around if (file := module_file(name))}


def reachable() -> list[Path]:
    """The modules that batch hosts run, and what these import."""
    found: set[Path] = set()
    pending = {ROOT / name for name in STARTS} | set((ROOT / "slurm/batch").rglob("*.py"))
    while pending:
        path = pending.pop()
        found.add(path)
        pending |= imported(path) - found
    return sorted(found)


FILES = reachable()


def test_imports_are_followed() -> None:
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {name.split("/")[0] for name in names} == {"common", "slurm"}
    assert {*STARTS, "common/__init__.py", "common/host_lists.py", "slurm/causes.py"} <= names


@pytest.mark.skipif(importlib.util.find_spec("vermin") is None, reason="vermin is not installed")
def test_syntax_and_library_are_those_of_python_36() -> None:
    vermin = [sys.executable, "-c", "import vermin; vermin.main()"]
    options = ["--no-tips", "-vvv", "-t=3.6-", "--eval-annotations", "--violations"]
    done = subprocess.run(
        [*vermin, *options, *map(str, FILES)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_annotations_are_without_unions(path: Path) -> None:
    """``str | None``: Python 3.10. vermin 1.9 overlooks those with a type of ``typing``."""
    unions = []
    for node in ast.walk(ast.parse(path.read_text())):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is None:
                continue
            for part in ast.walk(annotation):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr):
                    unions.append(part.lineno)
    assert unions == []


def python36() -> str | None:
    """A Python 3.6 of this machine; None without one."""
    program = shutil.which("python3.6")
    works = program and subprocess.run([program, "-V"], capture_output=True).returncode == 0
    return program if works else None


def test_python_36_imports_every_module() -> None:
    """Where there is such an interpreter; without one vermin alone checks the same."""
    program = python36()
    if program is None:
        return
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES]
    text = "; ".join(f"import {name}" for name in names if not name.endswith("__main__"))
    done = subprocess.run(
        [program, "-c", text],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
