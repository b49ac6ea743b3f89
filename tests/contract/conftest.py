"""Fixtures that the contract tests share: a tiny model, and engines without imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.contract.forked_engines import ForkedEngines

ROOT = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 600.0  # on a machine that is busy with other work


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the tiny model and its problems; return their folder.

    The warm-up is too short for answers that are often right, and long enough for distributions
    that are not uniform.
    """
    folder = tmp_path_factory.mktemp("tiny")
    words = ["--out", str(folder), "--warmup-steps", "60"]
    subprocess.run([sys.executable, "-m", "rlpost.cli.tiny_model", *words], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedEngines]:
    """Start the engines of a module from one process, which imports SGLang once."""
    from tests.contract.forked_engines import ForkedEngines

    with ForkedEngines(tmp_path_factory.mktemp("engines") / "imports.log") as started:
        yield started
