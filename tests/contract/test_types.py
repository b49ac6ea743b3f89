"""Types are consistent in all code; all but the trainer is checked strictly (setup.cfg, [mypy])."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_types_are_consistent():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_calls_of_ranks_have_the_types_of_their_methods():
    """Ranks are called by the method, so a wrong argument is an error before any job starts."""
    path = ROOT / "tests/contract/wrong_calls.py"
    command = [sys.executable, "-m", "mypy", "--explicit-package-bases", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    expected = [
        number
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "  # WRONG: " in line
    ]
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert {int(line.split(":")[1]) for line in errors} == set(expected), done.stdout + done.stderr


def test_benchmarks_call_functions_with_arguments_that_exist():
    """No test runs most of them. Other errors of types are theirs: they pass tuples as columns."""
    command = [sys.executable, "-m", "mypy", "--explicit-package-bases", "benchmarks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "source files)" in done.stdout, done.stdout + done.stderr
    assert not [line for line in done.stdout.splitlines() if "[call-arg]" in line]


def test_an_untyped_return_value_in_a_strict_package_is_an_error(tmp_path):
    """It is no error in other packages.

    So strictness is neither global nor lost by accident.
    """
    for room in ("common", "slurm", "rlpost", "rlpost/config", "rlpost/observe"):
        folder = tmp_path / room
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "new.py").write_text(
            "import torch\n\n\ndef one() -> int:\n    return torch.one()\n"
        )
    command = [
        sys.executable,
        "-m",
        "mypy",
        f"--config-file={ROOT}/setup.cfg",
        "--cache-dir=/dev/null",
    ]
    done = subprocess.run(
        [*command, "common", "slurm", "rlpost"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.count("[no-any-return]") == 3, done.stdout
    assert "rlpost/observe" not in done.stdout
